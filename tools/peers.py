"""MaxText's program and ours for the same work, planned by the same simulator.

    PYTHONPATH=MAXTEXT/src:. python -m tools.peers [--check] [PATTERN ...]

in an environment that has MaxText. Each line of tools/peers.csv is a row of a recipe and the flags
of a layout of MaxText's for it. MaxText's own step runs unchanged with the row's global batch and
sequence, in each layout, with microbatches of MICROBATCHES sequences per GPU and with the policy of
REMATS that recomputes least and fits; a layout may fix either, and give `--price` of a kernel that
has none. The fastest counts. Ours is the recipe's row, with the words of the column `ours` where
another layout, microbatch or recomputation of ours is faster. Writes tools/results/peers.csv and
the table of docs/reference/peers.md. PATTERN chooses rows, 'llama31_70b h100 64 *'; the others keep
their result. --check plans nothing; it prints rows and pages that are out of date, and fails.
"""

import argparse
import csv
import fnmatch
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from maxbench.config import command_line
from maxbench.cost_model.memory import GIB
from tools import markdown
from tools.very_programs import ALWAYS, COMBINE, HOPPER, XLA

ROWS = pathlib.Path("tools/peers.csv")
RESULTS = pathlib.Path("tools/results/peers.csv")
PAGE = pathlib.Path("docs/reference/peers.md")
# MaxText's policies, from the least recomputation to the most.
REMATS = ("minimal_with_context", "save_dot_except_mlpwi", "save_qkv_proj", "full")
MICROBATCHES = (4, 3, 2, 1)  # sequences per GPU, those that divide a row's; a row may have 0.5
GOAL = 0.95  # of ours over MaxText's
KEY = ("workload", "gpu_type", "gpus", "dtype")
SHOWN = {
    "workload": "workload",
    "gpu_type": "GPU",
    "gpus": "GPUs",
    "dtype": "dtype",
    "theirs_s": "MaxText s",
    "ours_s": "ours s",
    "ratio": "ours over MaxText's",
    "theirs_gib": "MaxText GiB",
    "ours_gib": "ours GiB",
    "theirs_exposed_s": "MaxText exposed s",
    "ours_exposed_s": "ours exposed s",
    "theirs_compile_s": "MaxText compile s",
    "ours_compile_s": "ours compile s",
    "theirs": "MaxText's layout",
    "ours": "ours",
}


class Row(NamedTuple):
    """A row of a recipe."""

    flags: tuple[str, ...]  # of MaxText, one for each layout
    ours: tuple[str, ...]  # words that change the recipe's row


def rows() -> dict[tuple[str, ...], Row]:
    """All rows, by the columns KEY."""
    found: dict[tuple[str, ...], Row] = {}
    with ROWS.open(newline="") as f:
        for x in csv.DictReader(f):
            key, ours = tuple(x[k] for k in KEY), tuple(x["ours"].split())
            flags, before = found.get(key, Row((), ()))
            found[key] = Row((*flags, x["flags"]), (*before, *ours))
    return found


def plan(words: Sequence[str], gpu_type: str, theirs: bool) -> dict | str:
    """Figures of `maxbench plan`, or the last line of its error."""
    flags = XLA.format(*COMBINE.get(gpu_type, HOPPER)) if theirs else ""
    command = [sys.executable, "-m", "maxbench.plan", "--json", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"XLA_FLAGS": flags}
    )
    if done.returncode in (0, 3):
        return json.loads(done.stdout)
    return (done.stderr.strip().splitlines() or ["no output"])[-1]


def flags_of(layout: str, dtype: str, seq: int, per_gpu: float) -> Iterator[list[str]]:
    """MaxText's flags for a layout with each microbatch: one list for each policy of REMATS, of
    those that the layout does not fix itself."""
    always = dict(x.split("=", 1) for x in ALWAYS.split())
    own = dict(x.split("=", 1) for x in layout.split() if not x.startswith("--"))
    remats = [own["remat_policy"]] if "remat_policy" in own else REMATS
    microbatches: Sequence[float] = [x for x in MICROBATCHES if per_gpu % x == 0] or [per_gpu]
    if "per_device_batch_size" in own:
        microbatches = [float(own["per_device_batch_size"])]
    for microbatch in microbatches:
        given = {"per_device_batch_size": f"{microbatch:g}"}
        given["gradient_accumulation_steps"] = str(round(per_gpu / microbatch))
        given["max_target_length"] = str(seq)
        if dtype == "fp8":
            given["quantization"] = "fp8"
        every = ({**own, **given, "remat_policy": remat} for remat in remats)
        yield [" ".join("=".join(x) for x in (flags | always | flags).items()) for flags in every]


def fastest(row: tuple[str, ...], layouts: Sequence[str], per_gpu: float, seq: int) -> dict:
    """MaxText's fastest plan that fits, with its flags as `flags`.

    Raises:
      SystemExit: none fits; the last reason.
    """
    _, gpu_type, gpus, dtype = row
    best, why = None, "no layout"
    every = ((x, flags) for x in layouts for flags in flags_of(x, dtype, seq, per_gpu))
    for layout, attempts in every:
        options = [x for x in layout.split() if x.startswith("--")]
        for flags in attempts:
            words = [f"--maxtext={flags}", f"--gpu_type={gpu_type}", f"--gpus={gpus}", *options]
            found = plan(words, gpu_type, theirs=True)
            print(" ", flags, found if isinstance(found, str) else found["step_s"], flush=True)
            if isinstance(found, str):
                why = found
                break
            if found["fits"]:
                if best is None or found["step_s"] < best["step_s"]:
                    shown = [x for x in flags.split() if x not in ALWAYS.split()]
                    best = found | {"flags": " ".join([*shown, *options])}
                break
    if best is None:
        sys.exit(f"{' '.join(row)}: no layout of MaxText's fits: {why}")
    return best


def compare(row: tuple[str, ...], of: Row) -> dict[str, str]:
    """The result of a row."""
    workload, gpu_type, gpus, dtype = row
    words = [f"--config=configs/{workload}.py", f"--gpu_type={gpu_type}", f"--gpus={gpus}"]
    words += [f"--dtype={dtype}", *(["--config.precision.backend=xla"] * (dtype != "bf16"))]
    words += of.ours
    run = command_line.run_of(words)
    ours = plan(words, gpu_type, theirs=False)
    if isinstance(ours, str):
        sys.exit(f"{' '.join(row)}: {ours}")
    theirs = fastest(row, of.flags, run.layout.gbs / run.layout.gpus, run.train.seq)
    found = dict(zip(KEY, row, strict=True))
    for name, figures in (("theirs", theirs), ("ours", ours)):
        found[f"{name}_s"] = f"{figures['step_s']:.3f}"
        found[f"{name}_gib"] = f"{figures['memory']['total'] / GIB:.1f}"
        found[f"{name}_exposed_s"] = f"{figures['parts_s'].get('exposed', 0):.3f}"
        found[f"{name}_compile_s"] = f"{figures['compile']['compile_s']:.0f}"
    ratio = f"{ours['step_s'] / theirs['step_s']:.3f}"
    layout = f"{ours['layout']}; {ours['remat']}".replace(",", ";")
    return found | {"ratio": ratio, "theirs": theirs["flags"], "ours": layout}


def read() -> list[dict[str, str]]:
    """Stored results."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as f:
        return [*csv.DictReader(f)]


def page(text: str, results: Sequence[Mapping[str, str]]) -> str:
    """The page with the table of the results."""
    ratios = [float(x["ratio"]) for x in results]
    summary = f"{len(ratios)} rows: ours over MaxText's is {statistics.median(ratios):.2f} in the "
    summary += f"median, from {min(ratios):.2f} to {max(ratios):.2f}; "
    summary += f"{sum(x <= GOAL for x in ratios)} are at most {GOAL}.\n\n"
    rows = ([x[name] for name in SHOWN] for x in results)
    return markdown.replaced(text, "peers", summary + markdown.table([*SHOWN.values()], rows))


def problems() -> Iterator[str]:
    """Rows without a result, and a page with other figures."""
    stored = {tuple(x[k] for k in KEY) for x in read()}
    for row in rows().keys() - stored:
        yield f"{RESULTS}: {' '.join(row)} is not planned"
    if PAGE.read_text() != page(PAGE.read_text(), read()):
        yield f"{PAGE}: its table is not that of {RESULTS}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("patterns", nargs="*")
    options = parser.parse_args()
    if options.check:
        sys.exit("\n".join(problems()) or 0)
    found = {tuple(x[k] for k in KEY): x for x in read()}
    for row, of in rows().items():
        name = " ".join(row)
        if options.patterns and not any(fnmatch.fnmatch(name, x) for x in options.patterns):
            continue
        found[row] = compare(row, of)
        print(name, found[row]["ratio"], flush=True)
        ordered = [found[key] for key in rows() if key in found]
        with RESULTS.open("w", newline="") as f:
            writer = csv.DictWriter(f, SHOWN, lineterminator="\n")
            writer.writeheader()
            writer.writerows(ordered)
        PAGE.write_text(page(PAGE.read_text(), ordered))


if __name__ == "__main__":
    main()
