"""Plans rows of the recipe tables, in several processes, into docs/plan.csv, the first ones of
each kind into docs/reference/plan_table.md, and those that are published, compared with the
published programs, into docs/reference/prediction_errors.md.

  python -m tools.plan_table [--jobs 2] [--cached] [ROWS ...]

ROWS are patterns of a row's workload, GPU type, GPUs, dtype and scaling; the other rows keep their
line:

  python -m tools.plan_table 'qwen3_* b200 256 fp8 *'

A row is planned with the remat policy of the published run and, if that does not fit, also with
--best_remat. Compiled programs are cached, so a sweep that was stopped can be continued. --cached:
only rows whose program is in the cache; the others keep their line, if they have one. The column
`prices` is the revision of the cost model that a line was computed with.
"""

import argparse
import ast
import concurrent.futures
import csv
import dataclasses
import fnmatch
import hashlib
import io
import json
import pathlib
import re
import statistics
import subprocess
import sys
from collections.abc import Callable

from maxbench.config import command_line, layout_table, recipes
from maxbench.cost_model import compile_cache
from maxbench.cost_model.memory import GIB
from maxbench.evidence import published
from tools import markdown

TABLE = "## First rows"  # heading in docs/reference/plan_table.md, above the generated table
CSV = pathlib.Path("docs/plan.csv")
PAGE = pathlib.Path("docs/reference/prediction_errors.md")
README = pathlib.Path("README.md")
NEAR_PCT = 10  # a predicted step this near to a published one counts as near
# Pages with the screen of Llama 2 70B on 128 GPUs.
QUOTED = [
    pathlib.Path("docs", name)
    for name in ("how-to/plan_a_purchase.md", "tutorial/laptop_to_report.md")
]
# Files that determine the prediction of a program, besides the program itself.
COST_MODEL = (
    "hardware/gpus.toml",
    "cost_model/costs.py",
    "cost_model/simulate.py",
    "cost_model/meaning.py",
    "planning/pipeline_timing.py",
    "planning/program_names.py",
)
COLUMNS = {
    "workload": "workload",
    "gpu_type": "GPU",
    "gpus": "GPUs",
    "dtype": "dtype",
    "scaling": "scaling",
    "remat": "remat",
    "memory_gib": "memory GiB",
    "fits": "fits",
    "step_s": "predicted s",
    "published_s": "published s",
    "over_published_pct": "over published %",
    "mfu_pct": "MFU %",
    "exposed_pct": "exposed %",
    "copies_pct": "copies %",
    "decisions_pct": "decisions %",
    "bubble_pct": "bubble %",
    "fp8_ratio": "FP8/BF16",
    "fp8_ratio_published": "FP8/BF16 published",
    "fitting_remat": "remat that fits",
    "fitting_step_s": "predicted s with it",
    "prices": "prices",
    "note": "note",
}
SHOWN = ["workload", "gpu_type", "gpus", "dtype", "memory_gib", "fits", "step_s", "published_s"]
SHOWN += ["over_published_pct", "mfu_pct", "exposed_pct"]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a recipe table."""

    config: str
    gpu_type: str
    gpus: int
    dtype: str
    scaling: str

    @property
    def flags(self) -> list[str]:
        more = ["--strong_scaling"] if self.scaling == "strong" else []
        if self.dtype in ("fp8", "nvfp4"):  # the published programs, also where TE is installed
            more += ["--config.precision.backend=xla"]
        names = ("config", "gpus", "gpu_type", "dtype")
        return [f"--{name}={getattr(self, name)}" for name in names] + more


def rows(configs: list[str]) -> list[Row]:
    """All rows of the tables of workload files."""
    every = []
    for config in configs:
        for row in layout_table.table(recipes.load(config).layouts):
            names = [f.name for f in dataclasses.fields(Row)][1:]
            every.append(Row(config, **{name: row[name] for name in names}))
    return every


def cost_model_revision() -> str:
    """Hash of COST_MODEL, without docstrings and comments."""
    package, digest = pathlib.Path(compile_cache.__file__).parents[1], hashlib.sha256()
    for name in COST_MODEL:
        text = (package / name).read_text()
        code = compile_cache.code_of(ast.parse(text)) if name.endswith(".py") else text
        digest.update(code.encode())
    return digest.hexdigest()[:8]


def key(row: Row) -> dict[str, str]:
    """The columns that identify a row's line."""
    columns = {k: str(getattr(row, k)) for k in ("gpu_type", "gpus", "dtype", "scaling")}
    return {"workload": pathlib.Path(row.config).stem} | columns


def plan_row(row: Row) -> dict:
    """A row's line of the table. Each plan runs in a process of its own, which frees the compiler's
    memory."""
    line = dict.fromkeys(COLUMNS, "") | key(row) | {"prices": cost_model_revision()}
    plan, error = _plan(row.flags)
    if plan is None:
        return line | {"note": error}
    line |= _columns(plan)
    if not plan["fits"]:
        fitting, error = _plan([*row.flags, "--best_remat"])
        if fitting is None or not fitting["fits"]:
            return line | {"note": error or "no policy fits"}
        line |= {"fitting_remat": fitting["remat"], "fitting_step_s": _s(fitting["step_s"])}
    return line


def _plan(flags: list[str]) -> tuple[dict | None, str]:
    command = [sys.executable, "-m", "maxbench.plan", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode in (0, 3):
        return json.loads(done.stdout), ""
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return None, last.removeprefix("maxbench plan: error: ").partition(";")[0]


def _s(seconds: float) -> str:
    return f"{seconds:.3f}"


def _columns(plan: dict) -> dict:
    known = plan["published"] or {}
    percent = lambda error: "" if error is None else f"{error * 100:+.1f}"
    share = lambda part, n=1: f"{plan['parts_s'].get(part, 0) / plan['step_s'] * 100:.{n}f}"
    return {
        "remat": plan["remat"],
        "memory_gib": f"{plan['memory']['total'] / GIB:.1f}",
        "fits": "yes" if plan["fits"] else "no",
        "step_s": _s(plan["step_s"]),
        "published_s": known["step_s"] if "over_published" in known else "",
        "over_published_pct": percent(known.get("over_published")),
        "mfu_pct": f"{plan['mfu']['full'] * 100:.1f}",
        "exposed_pct": share("exposed"),
        "copies_pct": share("copy"),
        "decisions_pct": share("host", 2),
        "bubble_pct": share("idle"),
    }


def sweep(every: list[Row], jobs: int, log: Callable[[str], None]) -> list[dict]:
    """Lines of all rows, in their order."""
    lines: dict[Row, dict] = {}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(plan_row, row): row for row in every}
        for done in concurrent.futures.as_completed(running):
            row, line = running[done], done.result()
            lines[row] = line
            name = f"{line['workload']} {row.gpus} x {row.gpu_type} {row.dtype} {row.scaling}"
            result = line["note"] or f"{line['step_s']} s"
            log(f"{len(lines)}/{len(every)}  {name}: {result}")
    for row, line in lines.items():
        if row.dtype == "fp8" and (bf16 := lines.get(dataclasses.replace(row, dtype="bf16"))):
            line |= _ratios(line, bf16)
    return [lines[row] for row in every]


def _ratios(fp8: dict, bf16: dict) -> dict:
    """Step time of FP8 over BF16, in each column where both are known."""
    columns = {"fp8_ratio": "step_s", "fp8_ratio_published": "published_s"}
    known = {k: (fp8[c], bf16[c]) for k, c in columns.items() if fp8[c] and bf16[c]}
    return {k: f"{float(a) / float(b):.3f}" for k, (a, b) in known.items()}


def as_csv(lines: list[dict]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def as_markdown(lines: list[dict]) -> str:
    """The first row of each workload, GPU type and dtype that is published, on H100, or in BF16."""
    first: dict[tuple, dict] = {}
    for x in lines:
        shown = x["published_s"] or x["gpu_type"] == "h100" or x["dtype"] == "bf16"
        if x["step_s"] and shown:
            first.setdefault((x["workload"], x["gpu_type"], x["dtype"]), x)
    rows = ([x[k] for k in SHOWN] for x in first.values())
    return markdown.table([COLUMNS[k] for k in SHOWN], rows)


def _framework(line: dict) -> str:
    """'Megatron-Bridge', or 'NeMo and MaxText': the program of a published row."""
    steps = {r.step_s for r in published.step_time_rows()}
    return "NeMo and MaxText" if float(line["published_s"]) in steps else "Megatron-Bridge"


def counts(lines: list[dict]) -> list[tuple]:
    """For each other program: its name, its published rows, their median in percent, and how many
    of our predicted steps are near, slower and faster."""
    programs = []
    for name in ("NeMo and MaxText", "Megatron-Bridge"):
        compared = (x for x in lines if x["over_published_pct"] and _framework(x) == name)
        found = [float(x["over_published_pct"]) for x in compared]
        slower, faster = (sum(sign * x > NEAR_PCT for x in found) for sign in (1, -1))
        near = len(found) - slower - faster
        programs.append(
            (name, len(found), f"{statistics.median(found):+.1f}", near, slower, faster)
        )
    return programs


def over_published(lines: list[dict]) -> str:
    """Our predicted steps over published ones: how many are near, and the rows."""
    compared = [x for x in lines if x["over_published_pct"]]
    shown = ["gpu_type", "dtype", "scaling", "memory_gib", "step_s", "published_s"]
    shown += ["over_published_pct", "exposed_pct", "copies_pct"]
    rows = ([f"{x['workload']}, {x['gpus']}", *(x[k] for k in shown)] for x in compared)
    heads = ["program", "rows", "median %", f"within {NEAR_PCT} %", "slower", "faster"]
    return f"{markdown.table(heads, counts(lines))}\n" + markdown.table(
        ["workload, GPUs", *(COLUMNS[name] for name in shown)], rows
    )


def errors_page(text: str, lines: list[dict]) -> str:
    """PAGE with the comparison of these lines."""
    return markdown.replaced(text, "ours over NVIDIA's", over_published(lines))


def problems() -> list[str]:
    """Reasons not to publish the table: rows that do not fit, pages with other figures."""
    with CSV.open(newline="") as f:
        lines = [*csv.DictReader(f)]
    name = lambda x: f"{x['workload']} {x['gpus']} x {x['gpu_type']} {x['dtype']}"
    found = [f"{name(x)} does not fit" for x in lines if x["fits"] != "yes"]
    shown = {"workload": "llama2_70b", "gpu_type": "h100", "gpus": "128", "dtype": "bf16"}
    quoted = next(x for x in lines if shown.items() <= x.items())
    for path in QUOTED:
        shown = path.read_text().partition("Llama 2 70B bf16, 80 layers")[2]
        step = re.search(r"([\d.]+) s (?:a|per) step", shown)
        if not step or step[1] != quoted["step_s"]:
            found.append(f"{path} shows {step and step[1]} s, the table {quoted['step_s']} s")
    for _, rows, _, near, slower, faster in counts(lines):
        quoted = f"within {NEAR_PCT} % on {near}, slower on {slower}, faster on {faster}"
        if not re.search(rf"of {rows} [^;]*{quoted}", README.read_text()):
            found.append(f"{README} does not show: of {rows}, {quoted}")
    if errors_page(PAGE.read_text(), lines) != PAGE.read_text():
        found.append(f"{PAGE} has another comparison")
    return [f"{CSV}: {text}" for text in found]


def cached(row: Row) -> bool:
    """Whether the row's program is in the cache."""
    return compile_cache.load(command_line.run_of(row.flags)) is not None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--cached", action="store_true", help="only rows that were compiled")
    parser.add_argument(
        "--check", action="store_true", help="plans nothing; exits with the problems of the table"
    )
    parser.add_argument("rows", nargs="*", default=["*"], metavar="ROWS", help="all, if absent")
    options = parser.parse_args()
    if options.check:
        sys.exit("\n".join(problems()) or 0)
    every = rows(sorted(str(path) for path in pathlib.Path("configs").glob("*.py")))
    log = lambda text: print(text, file=sys.stderr, flush=True)
    is_named = lambda row: any(
        fnmatch.fnmatch(" ".join(key(row).values()), pattern) for pattern in options.rows
    )
    chosen = [row for row in every if is_named(row) and (not options.cached or cached(row))]
    if not chosen:
        sys.exit(f"plan_table: no row matches {' or '.join(map(repr, options.rows))}")
    with CSV.open(newline="") as f:
        lines = {tuple(x[k] for k in key(every[0])): x for x in csv.DictReader(f, restval="")}
    lines |= {tuple(x[k] for k in key(every[0])): x for x in sweep(chosen, options.jobs, log)}
    keys = [tuple(key(row).values()) for row in every]
    ordered = [lines[k] for k in keys if k in lines]
    CSV.write_text(as_csv(ordered))
    page = pathlib.Path("docs/reference/plan_table.md")
    head, _, tail = page.read_text().partition(TABLE)
    _, heading, after = tail.partition("\n## ")
    PAGE.write_text(errors_page(PAGE.read_text(), ordered))
    page.write_text(f"{head}{TABLE}\n\n{as_markdown(ordered)}{heading}{after}")
    sys.exit("\n".join(problems()) or 0)


if __name__ == "__main__":
    main()
