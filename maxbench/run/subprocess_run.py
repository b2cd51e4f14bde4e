"""A training run in a process of its own, for maxbench.train().

jax takes its devices, and most of a GPU's memory, once per process: a notebook that trained in its
own process could train once, and do nothing else with that GPU.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from maxbench.config.errors import UserError
from maxbench.metrics import records
from maxbench.run import terminal

FOLDER = "results: "  # the last line of a run: its folder
SECOND_LINE = "Training epoch "  # a step's second line, for parsers of NeMo logs
SUMMARY = "measured\n"  # first line of the summary
ERROR = "maxbench train: error: "


@dataclasses.dataclass(frozen=True, repr=False)
class TrainResult(records.Records):
    """A finished run. Prints as the summary at its end; in a notebook as tables."""

    code: int  # exit code: 0 done
    folder: pathlib.Path  # its log, metrics.jsonl and result.json
    result: Mapping[str, Any]  # result.json

    def __str__(self) -> str:
        return terminal.summary(terminal.summary_parts(self.result)).strip()

    def _repr_html_(self) -> str:
        parts = terminal.summary_parts(self.result)
        return "".join(
            records.html_table((title, ""), rows.items(), text=True)
            for title, rows in parts.items()
        )

    def records(self) -> list[dict[str, Any]]:
        """A row for each step: step, step_s, loss, grad_norm, lr, peak_bytes, time."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def train(words: Sequence[str], show: bool) -> TrainResult:
    """Runs `maxbench train` with these flags in a new process, and reads its results.

    Args:
      words: flags, which are valid.
      show: print the run's output, without the summary at its end.

    Raises:
      UserError: the run did not start; the message is its last line.
    """
    folder, last = None, ""
    with subprocess.Popen(
        [sys.executable, "-m", "maxbench.train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(FOLDER):
                folder = pathlib.Path(line.removeprefix(FOLDER).strip())
            show = show and line != SUMMARY
            if show and not line.startswith((SECOND_LINE, ERROR)):
                print(line, end="", flush=True)
            last = line.strip() or last
    if folder is None:
        raise UserError(last.removeprefix(ERROR))
    result = json.loads((folder / "result.json").read_text())
    return TrainResult(process.returncode, folder, result)
