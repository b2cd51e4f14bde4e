"""`maxbench.train(...)`: a run in a process of its own, and what it has left.

jax takes its devices, and most of a GPU's memory, once for a process: a notebook that trained by
itself could do so once, and nothing else with that GPU.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from maxbench.config import command_line, commands, python_api
from maxbench.config.errors import UserError
from maxbench.run import terminal

RESULTS = "results: "  # what a run says last: its folder
TWICE = "Training epoch "  # a step's second line, for other tools
ERROR = "maxbench train: error: "


@dataclasses.dataclass(frozen=True, repr=False)
class TrainResult(python_api.Records):
    """A run that is over. Prints as the summary that closes it; in a notebook as tables."""

    code: int  # exit code: 0 done
    folder: pathlib.Path  # its log, metrics.jsonl and result.json
    result: Mapping[str, Any]  # result.json

    def __str__(self) -> str:
        return terminal.summary(terminal.closing(self.result)).strip()

    def _repr_html_(self) -> str:
        parts = terminal.closing(self.result)
        tables = (python_api.table((t, ""), rows.items(), words=True) for t, rows in parts.items())
        return "".join(tables)

    def records(self) -> list[dict[str, Any]]:
        """A row for each step: step, step_s, loss, grad_norm, lr, peak_bytes, time."""
        return [json.loads(x) for x in (self.folder / "metrics.jsonl").read_text().splitlines()]


def train(
    config: str, *, settings: Mapping[str, Any] | None = None, show: bool = True, **given: Any
) -> TrainResult:
    """Trains a workload on what is here and measures it, in a process of its own.

    `maxbench.train("llama31_8b:tiny", steps=8)` is `maxbench train --config llama31_8b:tiny
    --steps 8`.

    Args:
      config: a workload's name, or the path of its file, with presets: 'llama31_8b:tiny'.
      settings: any setting by its place, {'train.remat': 'full'}.
      show: print what the run says, a line per step.
      given: flags of the command: gpus, steps, dtype, output_dir, ...

    Raises:
      UserError: what cannot be, as the command would say it.
    """
    if wrong := {"dry_run", "json"} & {*given}:
        raise UserError(f"{wrong.pop()} is of the command line: nothing would be trained")
    words = python_api.words({"config": config, **given}, settings)
    command_line.parse(commands.define("train"), ["maxbench", *words])  # wrong ones are told here
    command = [sys.executable, "-m", "maxbench.train", *words]
    folder, last = None, ""
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, errors="replace", **pipe) as process:
        for line in process.stdout:
            if line.startswith(RESULTS):
                folder = pathlib.Path(line.removeprefix(RESULTS).strip())
            show = show and line != "measured\n"  # the summary is what is returned
            if show and not line.startswith((TWICE, ERROR)):
                print(line, end="", flush=True)
            last = line.strip() or last
    if folder is None:
        raise UserError(last.removeprefix(ERROR))
    result = json.loads((folder / "result.json").read_text())
    return TrainResult(process.returncode, folder, result)
