"""Makes the pictures of README: a terminal, and the sample of a report's page.

  python -m benchmarks.pictures          from what is kept of a run, and from docs/report.html
  python -m benchmarks.pictures --run    trains the toy of the terminal again

docs/images/pictures.json has the digest of each one's source, so that a test finds a stale one.
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
KEPT = pathlib.Path(__file__).with_name("results") / "terminal.json"
MADE_FROM = IMAGES / "pictures.json"
COMMAND = "maxbench train --config llama31_8b:tiny --steps 12"
COLUMNS = 92
WINDOW = (1240, 700)  # pixels of the page that are shown


def trained() -> dict:
    """What a run of COMMAND leaves, as far as a terminal shows it."""
    with tempfile.TemporaryDirectory() as name:
        run = maxbench.train("llama31_8b:tiny", steps=12, output_dir=name, show=False)
        (log,) = run.folder.glob("log-*.out")
        lines = log.read_text().splitlines()
        steps = run.records()
    tokens = run.result["tokens_per_s"] * run.result["step_s"]["mean"]
    for step in steps:
        step["tokens_per_s"] = tokens / step["step_s"]
    shown = ("name", "status", "reason", "device", "step_s", "window", "tokens_per_s", "loss")
    shown += ("tflops_per_gpu", "peak_bytes", "start_to_first_step_s", "compile_s", "published")
    compiled = [line for line in lines if line.startswith("compiled in")]
    return {"lines": compiled, "steps": steps, "result": {k: run.result[k] for k in shown}}


def recorded(kept: dict) -> console.Console:
    """The terminal after a run, as this revision shows it."""
    with contextlib.redirect_stdout(io.StringIO()):
        screen = terminal.Screen()
        screen.stop()
    screen.console = console.Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False,
        color_system="truecolor", markup=False,
    )  # fmt: skip
    screen.console.print(f"$ {COMMAND}", style="bold green")
    for line in kept["lines"]:
        screen.line(line)
    for step in kept["steps"]:
        screen.step(step, len(kept["steps"]))
    screen.summary(terminal.closing(kept["result"]))
    return screen.console


def svg(kept: dict) -> str:
    """recorded() as a drawing that fetches no font."""
    made = recorded(kept).export_svg(title="maxbench", unique_id="maxbench")
    return re.sub(r"@font-face \{.*?\}\s*", "", made, flags=re.DOTALL)


def made_from() -> dict[str, str]:
    """Of each picture, a digest of what it shows: no fonts, no browser."""
    text = recorded(json.loads(KEPT.read_text())).export_text()
    shown = {"terminal.svg": text, "report.png": (DOCS / "report.html").read_text()}
    return {name: hashlib.sha256(x.encode()).hexdigest() for name, x in shown.items()}


def photograph(page: pathlib.Path, out: pathlib.Path) -> None:
    """The top of a page, by a browser without a screen."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += [f"--user-data-dir={profile}", "--window-size={},{}".format(*WINDOW)]
        flags += ["--blink-settings=preferredColorScheme=1", f"--screenshot={out}", page.as_uri()]
        subprocess.run([chromium, *flags], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    if "--run" in sys.argv:
        KEPT.write_text(json.dumps(trained(), indent=1) + "\n")
    (IMAGES / "terminal.svg").write_text(svg(json.loads(KEPT.read_text())))
    photograph(DOCS / "report.html", IMAGES / "report.png")
    MADE_FROM.write_text(json.dumps(made_from(), indent=1) + "\n")
