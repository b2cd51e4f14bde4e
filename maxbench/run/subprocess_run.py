"""A training run in a process of its own, for maxbench.train().

jax takes its devices, and most of a GPU's memory, once per process: a notebook that trained in its
own process could train once, and do nothing else with that GPU.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from maxbench.config.errors import UserError
from maxbench.config.options import TrainOptions
from maxbench.metrics import records
from maxbench.run import terminal

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


def train(asked: TrainOptions) -> TrainResult:
    """Trains in a new process (cli/train.py), and reads its results.

    Raises:
      UserError: the run did not start.
    """
    show = asked.show
    with tempfile.TemporaryDirectory() as name:
        place = pathlib.Path(name)
        (place / "options.json").write_text(json.dumps(asked.changed(), default=str))
        with subprocess.Popen(
            [sys.executable, "-m", "maxbench.cli.train", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                show = show and line != SUMMARY  # TrainResult prints as the summary
                if show and not line.startswith((SECOND_LINE, ERROR)):
                    print(line, end="", flush=True)
        file = place / "outcome.json"
        outcome = json.loads(file.read_text()) if file.exists() else {}
    if "folder" not in outcome:
        ended = f"the training process ended with exit code {process.returncode}"
        raise UserError(outcome.get("error", ended))
    folder = pathlib.Path(outcome["folder"])
    return TrainResult(process.returncode, folder, json.loads((folder / "result.json").read_text()))
