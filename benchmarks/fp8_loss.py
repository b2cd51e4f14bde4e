"""Trains a small Llama in BF16, FP8 and NVFP4, and plots the losses.

  python benchmarks/fp8_loss.py            2,000 steps each; some minutes on a CPU
  python benchmarks/fp8_loss.py --runs nvfp4        that one alone; others as stored

Writes benchmarks/results/fp8_loss.json and docs/images/fp8_loss.svg, and prints a table. The data
are train.data=bigram (maxbench/step/data.py), whose minimum loss is known.
"""

import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile

from maxbench.reporting.plots import Frame, ticks
from maxbench.step.data import SUCCESSORS

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUNS = {
    "bf16": ["--dtype", "bf16"],
    "fp8 current": ["--dtype", "fp8", "--config.precision.scaling=current"],
    "fp8 delayed": ["--dtype", "fp8", "--config.precision.scaling=delayed"],
    "mxfp8": ["--dtype", "fp8", "--config.precision.scaling=mxfp8", "--gpu_type", "b200"],
    "nvfp4": ["--dtype", "nvfp4", "--gpu_type", "b200"],
}
COLOURS = ("#1f4e8c", "#d1495b", "#2a9d5c", "#8a5cc2", "#d98324")
SMOOTH = 50  # steps that a plotted and compared loss is averaged over
FLAGS = [
    "--seq",
    "64",
    "--mbs",
    "8",
    "--layers",
    "2",
    "--config.train.data=bigram",
    "--config.optim.warmup=100",
]
FLAGS += ["--config.optim.lr=0.002", "--config.optim.lr_min=0.0002", "--cpu_devices", "1"]


def losses(flags: list[str], steps: int) -> list[float]:
    """Loss of every step of one training run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "maxbench.train",
            "--config",
            "configs/llama31_8b.py:tiny",
        ]
        command += [*FLAGS, *flags, "--steps", str(steps), "--output_dir", folder]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (log,) = pathlib.Path(folder).rglob("metrics.jsonl")
        lines = map(json.loads, log.read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]


def smooth(values: list[float]) -> list[float]:
    """Means of consecutive groups of SMOOTH values."""
    starts = range(0, len(values) - SMOOTH + 1, SMOOTH)
    return [sum(values[i : i + SMOOTH]) / SMOOTH for i in starts]


def picture(curves: dict[str, list[float]]) -> str:
    """An SVG plot of the curves."""
    steps = SMOOTH * max(map(len, curves.values()))
    top = math.ceil(max(map(max, curves.values())))
    xs = {x: f"{x:,.0f}" for x in ticks(0, steps)}
    ys = {y: f"{y:g}" for y in ticks(0, top)}
    title = f"Loss, mean of {SMOOTH} steps; dashed: the minimum, ln {SUCCESSORS}"
    f = Frame(title=title, x=(0, steps), y=(0, top), xs=xs, ys=ys, names=("step", ""), lines={})
    text = lambda x, y, anchor, s: f'<text x="{x}" y="{y}" text-anchor="{anchor}">{s}</text>'
    line = lambda y, style: (
        f'<line x1="{f.LEFT}" x2="{f.RIGHT}" y1="{f.down(y)}" y2="{f.down(y)}" {style}/>'
    )
    parts = [line(y, 'stroke="#ddd"') for y in ys]
    parts += [text(f.LEFT - 7, f.down(y) + 4, "end", label) for y, label in ys.items()]
    anchor = lambda x: "end" if x == steps else "middle"
    parts += [text(f.left(x), f.BOTTOM + 17, anchor(x), label) for x, label in xs.items()]
    parts.append(text(f.RIGHT, f.HIGH - 3, "end", "step"))
    parts.append(line(math.log(SUCCESSORS), 'stroke="#888" stroke-dasharray="4 3"'))
    for number, ((name, curve), colour) in enumerate(zip(curves.items(), COLOURS, strict=False)):
        pixels = f.pixels([((i + 0.5) * SMOOTH, y) for i, y in enumerate(curve)])
        points = " ".join(f"{x},{y}" for x, y in pixels)
        dash = f' stroke-dasharray="{6 * number} 4"' if number else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" '
                     f'stroke-width="2"{dash}/>')  # fmt: skip
        parts.append(f'<text x="{f.LEFT + 200}" y="{f.TOP + 18 * number + 12}" fill="{colour}">'
                     f"{name}: {curve[-1]:.4f}</text>")  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {f.WIDE} {f.HIGH}">'
        "<style>text{font:12px sans-serif}</style>"
        f'<rect width="{f.WIDE}" height="{f.HIGH}" fill="#fff"/>'
        f'<text x="{f.LEFT}" y="{f.TOP - 14}">{title}</text>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS])
    args = parser.parse_args()
    steps, path = args.steps, ROOT / "benchmarks" / "results" / "fp8_loss.json"
    stored = json.loads(path.read_text())["curves"] if len(args.runs) < len(RUNS) else {}
    new = {name: smooth(losses(RUNS[name], steps)) for name in args.runs}
    curves = {name: (stored | new)[name] for name in RUNS}
    rows = {}
    for name, curve in curves.items():
        differences = [abs(a / b - 1) for a, b in zip(curve, curves["bf16"], strict=True)]
        rows[name] = {
            "final": curve[-1],
            "apart_final": differences[-1],
            "apart_most": max(differences),
        }
    path.parent.mkdir(exist_ok=True)
    record = {"steps": steps, "smooth": SMOOTH, "flags": FLAGS, "rows": rows, "curves": curves}
    path.write_text(json.dumps(record, indent=1) + "\n")
    (ROOT / "docs/images/fp8_loss.svg").write_text(picture(curves))
    print(f"{'run':<14}{'final loss':>12}{'vs bf16':>9}{'at most':>9}")
    for name, row in rows.items():
        print(f"{name:<14}{row['final']:>12.4f}{row['apart_final']:>9.2%}{row['apart_most']:>9.2%}")
    print(f"minimum: ln {SUCCESSORS} = {math.log(SUCCESSORS):.4f}; {steps} steps")


if __name__ == "__main__":
    main()
