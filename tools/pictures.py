"""Draws the README's pictures: a terminal, and the sample report's page.

  python -m tools.pictures          from the stored run, and from docs/report.html
  python -m tools.pictures --run    trains the toy again first

docs/images/pictures.json has a digest of each picture's source, so that a test finds a stale one.
"""

import contextlib
import hashlib
import io
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from rich import console

import maxbench
from maxbench.run import terminal

DOCS = pathlib.Path(__file__).parents[1] / "docs"
IMAGES = DOCS / "images"
STORED_RUN = pathlib.Path(__file__).with_name("results") / "terminal.json"
DIGESTS = IMAGES / "pictures.json"
COMMAND = "maxbench train --config llama31_8b:tiny --steps 12"
COLUMNS = 92
VIEWPORT = (1240, 700)  # pixels


def train_toy() -> dict:
    """Runs COMMAND and returns what the terminal shows of it: log lines, steps, result."""
    with tempfile.TemporaryDirectory() as name:
        run = maxbench.train("llama31_8b:tiny", steps=12, output_dir=name, show=False)
        (log,) = run.folder.glob("log-*.out")
        lines = log.read_text().splitlines()
        steps = run.records()
    tokens = run.result["tokens_per_s"] * run.result["step_s"]["mean"]
    for step in steps:
        step["tokens_per_s"] = tokens / step["step_s"]
    keys = ("name", "status", "reason", "device", "step_s", "window", "tokens_per_s", "loss")
    keys += ("loss_floor", "tflops_per_gpu", "peak_bytes", "start_to_first_step_s", "compile_s")
    keys += ("published",)
    compiled = [line for line in lines if line.startswith("compiled in")]
    return {"lines": compiled, "steps": steps, "result": {k: run.result[k] for k in keys}}


def replay(run: dict) -> console.Console:
    """Prints a stored run with this revision's terminal code to a recording console."""
    with contextlib.redirect_stdout(io.StringIO()):
        screen = terminal.Screen()
        screen.stop()
    screen.console = console.Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False,
        color_system="truecolor", markup=False,
    )  # fmt: skip
    screen.console.print(f"$ {COMMAND}", style="bold green")
    for line in run["lines"]:
        screen.line(line)
    for step in run["steps"]:
        screen.step(step, len(run["steps"]))
    screen.summary(terminal.summary_parts(run["result"]))
    return screen.console


def terminal_svg(run: dict) -> str:
    """replay() as an SVG without remote fonts."""
    image = replay(run).export_svg(title="maxbench", unique_id="maxbench")
    return re.sub(r"@font-face \{.*?\}\s*", "", image, flags=re.DOTALL)


def source_digests() -> dict[str, str]:
    """SHA-256 of the text that each picture shows; independent of fonts and browser."""
    text = replay(json.loads(STORED_RUN.read_text())).export_text()
    sources = {"terminal.svg": text, "report.png": (DOCS / "report.html").read_text()}
    return {name: hashlib.sha256(x.encode()).hexdigest() for name, x in sources.items()}


def screenshot(page: pathlib.Path, out: pathlib.Path) -> None:
    """Writes the top of a page as PNG, by headless Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += [f"--user-data-dir={profile}", "--window-size={},{}".format(*VIEWPORT)]
        flags += ["--blink-settings=preferredColorScheme=1", f"--screenshot={out}", page.as_uri()]
        subprocess.run([chromium, *flags], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    if "--run" in sys.argv:
        STORED_RUN.write_text(json.dumps(train_toy(), indent=1) + "\n")
    (IMAGES / "terminal.svg").write_text(terminal_svg(json.loads(STORED_RUN.read_text())))
    screenshot(DOCS / "report.html", IMAGES / "report.png")
    DIGESTS.write_text(json.dumps(source_digests(), indent=1) + "\n")
