"""The list of a suite's runs and what is expected of each: experiments/suite_<name>_<time>.json.

`maxbench launch --suite` writes it, `maxbench report --suite` reads it.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from maxbench.config.errors import UserError
from maxbench.config.validation import build, field, validate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expectation:
    """Requirements of a run besides its last step with finite losses; 0 = none."""

    published: float = field(0.0, at_least=0, at_most=10)  # share of the published tokens/s
    share: float = field(0.0, at_least=0, at_most=10)  # of the baseline's tokens/s
    baseline_s: float = field(0.0, at_least=0)  # step time of the same work
    baseline: str = ""  # origin of baseline_s: a published run or a prediction
    step_s: float = field(0.0, at_least=0)  # largest mean step time
    loss: float = field(0.0, at_least=0)  # largest loss of the last step

    def __post_init__(self):
        validate(self)
        if bool(self.share) != bool(self.baseline_s):
            raise UserError(
                f"share={self.share:g} is of the tokens/s at baseline_s={self.baseline_s:g}: "
                "give both, and the origin of the baseline as baseline"
            )

    def share_of_baseline(self, step_s: float) -> str:
        """'97.2% of the baseline of 10.42 s (published for 256 GPUs)'; '' without a baseline."""
        if not self.baseline_s:
            return ""
        return f"{self.baseline_s / step_s:.1%} of the baseline {self._baseline}"

    @property
    def _baseline(self) -> str:
        return f"of {self.baseline_s:g} s" + (f" ({self.baseline})" if self.baseline else "")

    def __str__(self) -> str:
        requirements = {
            "at least {:.0%} of published": self.published,
            f"at least {{:.0%}} of the baseline {self._baseline}": self.share,
            "loss at most {:g}": self.loss,
            "at most {:g} s a step": self.step_s,
        }
        return ", ".join(text.format(value) for text, value in requirements.items() if value)


class SuiteRun(NamedTuple):
    """A run of a suite."""

    name: str
    folder: pathlib.Path | None  # of its first start; None if no job was submitted
    expect: Expectation

    def last_start(self) -> pathlib.Path | None:
        """The run's folder; of a job that was requeued, the folder of its last start."""
        if self.folder:
            with contextlib.suppress(OSError, IndexError):
                job = (self.folder / "job_id").read_text().strip()
                stamp = (self.folder.parent / f".job_{job}").read_text().split()[-1]
                return self.folder.with_name(f"{self.folder.parent.name}_{stamp}")
        return self.folder


class SuiteWriter:
    """Writes the list anew before each submission: it survives a submission that fails."""

    def __init__(
        self, file: pathlib.Path, suite: str, expectations: Sequence[tuple[str, Expectation]]
    ):
        """Args: expectations: (name of the run, what is expected of it), in submission order."""
        self.file = file
        self._runs = [{"run": n, "expect": dataclasses.asdict(e)} for n, e in expectations]
        self._list = {"suite": suite, "runs": self._runs}
        self._next = iter(self._runs)

    def add(self, folder: pathlib.Path) -> None:
        """Adds the folder of the next run, and writes the list."""
        next(self._next)["folder"] = os.path.relpath(folder, self.file.parent)
        self.file.write_text(json.dumps(self._list, indent=1))


def read(file: str) -> tuple[str, list[SuiteRun]]:
    """The name of a suite and its runs.

    Raises:
      UserError: the file cannot be read, or is not such a list.
    """
    path = pathlib.Path(file)
    if not path.is_file():
        raise UserError(f"suite={file!r} is not a file; maxbench launch --suite writes one")
    try:
        data = json.loads(path.read_text())
        folder = lambda run: path.parent / run["folder"] if "folder" in run else None
        expect = lambda run: build(Expectation, "", run["expect"])
        runs = (SuiteRun(r["run"], folder(r), expect(r)) for r in data["runs"])
        return f"{data['suite']}", [run for run in runs if run.name]
    except OSError as e:
        raise UserError(f"suite={file!r} cannot be read: {e.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(
            f"suite={file!r} is not a list of runs as maxbench launch --suite writes it: "
            "experiments/suite_<name>_<time>.json"
        ) from None
