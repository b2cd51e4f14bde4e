"""A report of a thousand runs of this program as HTML: time, memory, size of the page.

python -m benchmarks.thousand_runs
"""

import pathlib
import resource
import subprocess
import sys
import tempfile
from typing import NamedTuple

from tests.reporting.test_report import ours

CODE = """
import sys
from maxbench.cli import entry
from maxbench.run import process_stats
entry.run("report", ["--format=html", "--output={0}/report.html", "{0}"])
print(*{{"jax", "numpy"}} & {{*sys.modules}}, process_stats.process_peak_bytes(), sep=",")
"""


class Done(NamedTuple):
    """A report that was written."""

    cpu_s: float
    peak_bytes: int
    page_bytes: int
    loaded: str  # slow libraries that the command loaded


def report(folder: pathlib.Path, runs: int = 1000) -> Done:
    """Writes `runs` runs and a report on them into a folder."""
    for i in range(runs):
        n = (8, 16, 32)[i % 3]
        ours(folder, gpus=n, gbs=16 * n, stamp=i, step_s=lambda s, i=i: 9.4 + (s * i % 17) / 50)
    children = resource.RUSAGE_CHILDREN
    before = resource.getrusage(children).ru_utime
    command = (sys.executable, "-c", CODE.format(folder))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    cpu_s = resource.getrusage(children).ru_utime - before
    *loaded, peak = done.stdout.split(",")
    page = folder / "report.html"
    return Done(cpu_s, int(peak), page.stat().st_size, ",".join(loaded))


def main() -> None:
    """Prints the time, memory and size."""
    with tempfile.TemporaryDirectory() as folder:
        done = report(pathlib.Path(folder))
    print(f"{done.cpu_s:.1f} CPU s, {done.peak_bytes / 1e6:.0f} MB in memory")
    print(f"page of {done.page_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
