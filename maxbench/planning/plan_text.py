"""A plan as text: the screen of `maxbench plan`, tables of --search and --sensitivity."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from maxbench.config import recipes
from maxbench.config.run import Run
from maxbench.cost_model import memory, remat
from maxbench.cost_model.memory import GIB
from maxbench.cost_model.simulate import Unknown
from maxbench.planning.planner import Plan
from maxbench.planning.prediction import FACTORS, Prediction
from maxbench.terminal import console

PARTS = {  # key of figures()["parts_s"] -> its label
    "gemm": "GEMMs",
    "attention": "attention",
    "memory": "memory-bound kernels",
    "amax": "passes for scales",
    "copy": "copies, nothing computed",
    "priced": "kernels with a given price",
    "unpriced": "kernels without a price",
    "offload": "waiting for host memory",
    "launch": "gaps between kernels",
    "host": "host-side branches",
    "contention": "slower during communication",
    "slowest": "waiting for the slowest GPU",
    "exposed": "exposed communication",
    "idle": "pipeline idle",
}
PURPOSES = ("weights", "optimizer", "gradients", "activations", "workspace")  # of Memory


def format_plan(p: Plan, more: Sequence[str] = ()) -> str:
    """The plan of a run on one screen; `more` lines follow the headline."""
    run, f = p.run, p.figures()
    mfu, rate = f["mfu"], f["tflops_per_gpu"]
    precision, quantized = run.precision, ""
    if run.format.quantized:
        names = dict.fromkeys((precision.dtype, precision.backend, run.format.name))
        quantized = f", {' '.join(names)}"
    lines = [
        title(run),
        f"{run.layout.describe()}; remat {run.remat_summary}, "
        f"attention {p.compiled.attention}" + quantized,
        "",
        *headline(p, f),
        *more,
        "",
        *tables(p),
        "TFLOP/s per GPU: "
        + ", ".join(f"{rate[c]:.1f} ({c}, MFU {mfu[c]:.1%})" for c in mfu)
        + f"; executed {f['hfu']:.1%} of peak",
        *published_lines(p, f["published"]),
        *unknown_lines(p),
        compiled_line(p),
    ]
    return folded(lines)


def folded(lines: Iterable[str]) -> str:
    """Lines as text, folded where the terminal is narrower."""
    width = console.terminal_width()
    return "\n".join(x for line in lines for x in console.fold(line, width, "  ") or [""])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], **more: Any) -> list[str]:
    """Lines of a table, as wide as the terminal."""
    return console.table(heads, rows, width=console.terminal_width(), **more)


def time_unit(step_s: float) -> tuple[str, float]:
    """The unit of a step and of its parts, and how many of it are a second."""
    return ("s", 1.0) if step_s >= 0.1 else ("ms", 1e3)


def tables(p: Prediction) -> list[str]:
    """Memory of a GPU, its communication, and the parts of the step."""
    m, parts_s, (unit, scale) = p.memory, p.parts_s, time_unit(p.step_s)
    parts = {text: parts_s.get(part, 0.0) for part, text in PARTS.items()}
    seconds = {text: console.fixed(s * scale, 3) for text, s in parts.items() if s}
    shares = [[text, s, console.share(parts[text] / p.step_s)] for text, s in seconds.items()]
    sizes = m.parts | {"total": m.total, "capacity": m.capacity}
    sizes |= {"in host memory": p.compiled.host} if p.compiled.host else {}
    head, whole = ("GiB", GIB) if m.total >= GIB else ("MiB", GIB / 1024)
    rows = [[name, console.fixed(size / whole, 2)] for name, size in sizes.items()]
    total = ["total", f"{p.step_s * scale:.3f}", ""]
    traffic = [*_communication_table(p), ""] if p.timeline.traffic else []
    step = table(["predicted step", unit, "share"], [*shares, total])
    return [*table(["memory of one GPU", head], rows), "", *traffic, *step, ""]


def compiled_line(p: Prediction) -> str:
    """'compiled in 12.3 s'."""
    cached = ", from the cache" if p.cached else ""
    return f"compiled in {p.compiled.lower_s + p.compiled.compile_s:.1f} s{cached}"


def unknown_lines(p: Prediction) -> list[str]:
    """A line for each loop, conditional and kernel of which the program does not say enough."""
    groups: dict[tuple[str, str], list[Unknown]] = {}
    for x in p.timeline.unknown.values():
        groups.setdefault((x.name, x.counted), []).append(x)
    return [_unknown_line(p, same) for same in groups.values()]


def _unknown_line(p: Prediction, same: Sequence[Unknown]) -> str:
    x, seconds = same[0], sum(x.seconds for x in same)
    runs = sum(x.count for x in same)
    time = f"{seconds:.3g} s ({console.share(seconds / p.step_s)} of the step)"
    if x.counted == "one trip":
        return f"loop {x.name} of unknown length, counted as one trip, {time}"
    if x.counted == "the longest branch":
        return (
            f"conditional {x.name}, counted with the longest of {x.alternatives} branches, {time}"
        )
    return f"kernel {x.name} without a price, {runs:.0f} runs, at least {time} by its bytes"


def _communication_table(p: Prediction) -> list[str]:
    """Collectives of one GPU in a step, by kind and link."""
    unit, scale = time_unit(p.step_s)
    rows = [
        [x.kind, x.link.axes, x.link.name, f"{round(x.count)}",
         *map(console.fixed, (x.bytes / GIB, x.busy_s * scale, x.exposed_s * scale), (2, 3, 3))]
        for x in sorted(p.timeline.traffic.values(), key=lambda x: -x.busy_s)
    ]  # fmt: skip
    heads = ["communication of one GPU", "over", "link", "times", "GiB"]
    heads += [f"busy {unit}", f"exposed {unit}"]
    return table(heads, rows, text=(0, 1, 2))


def format_sensitivity(p: Prediction, seconds: Mapping[str, Sequence[float | None]]) -> str:
    """Table of seconds of a step, by part of the cluster and factor; None: it does not fit."""
    percent = lambda s: f"{console.change(s / p.step_s - 1):>6}"
    change = lambda s: f"{p.text_s(s)} s {percent(s)}" if s else "does not fit"
    rows = [[part, *map(change, row)] for part, row in seconds.items()]
    return "\n".join(table(["a step with", *(f"x {f}" for f in FACTORS)], rows))


def title(run: Run) -> str:
    """'Llama 3.1 405B bf16, 126 layers, seq 8192, on 512 x H100'."""
    m, a, name = run.model, run.layout, recipes.display_name(run.model.name, run.model.size)
    return (
        f"{name} {run.precision.dtype}, {m.layers} layers, seq {run.train.seq}, on "
        f"{a.gpus} x {a.gpu_type.upper()}"
    )


def headline(p: Plan, f: dict) -> list[str]:
    """Whether the run fits, its speed, the error band, and the published step. `f`: p.figures()."""
    unit, scale = time_unit(p.step_s)
    speed = f"{p.step_s * scale:.3f} {unit} a step, {f['tokens_per_s']:,.0f} tokens/s, "
    speed += f"{f['days_to_1t_tokens']:,.1f} days to 1T tokens, MFU {f['mfu']['full']:.1%}"
    lines = [fit_line(p), speed if p.fits else f"with enough memory: {speed}"]
    lines += [error_band_line(p)]
    row = f["published"]
    if row and not p.published.refusal:
        share = f"{abs(row['over_published']):.1%}"
        faster = f"{share} {'faster' if row['over_published'] < 0 else 'slower'} than"
        faster = "as fast as" if share == "0.0%" else faster
        lines += [f"{faster} published ({row['step_s']} s, {row['release']})"]
    return lines


def error_band_line(p: Plan) -> str:
    """'6.6 to 7.5 s in nine of ten known steps (h100 bf16, 9 programs); none of them with tp'."""
    b, gpu = p.band, p.run.layout.gpu_type
    unit, scale = time_unit(p.step_s)
    seconds = p.step_s * scale
    band = f"{console.interval(seconds * b.low, seconds * b.high)} {unit}"
    if not b.programs:
        return f"{band} in nine of ten {b.like}"
    text = f"{band} in nine of ten known steps ({b.like}, {b.programs} programs)"
    # Those of evidence/errors.csv are of dense models on meshes of dp and fsdp.
    other = ["experts"] * p.run.model.has_experts
    other += [axis for axis in ("pp", "cp", "tp") if getattr(p.run.layout, axis) > 1]
    text += f"; none of them with {', '.join(other)}" if other else ""
    return text if b.validated else f"{text}; unvalidated for {gpu.upper()}"


def format_ranking(plans: Sequence[Plan], given: Run) -> str:
    """Table of plans: those that fit, fastest first, then the others. `given` is marked."""
    rows = []
    for p in sorted(plans, key=lambda p: (not p.fits, p.step_s)):
        marker = "  (as given)" if p.run == given else ""
        layout = f"{p.run.layout.describe()}; {p.run.remat_summary}{marker}"
        mfu, spare = f"{p.figures()['mfu']['full']:.1%}", f"{p.memory.spare / GIB:.1f}"
        rows.append([f"{p.step_s:.3f}", mfu, spare, layout])
    heads = ["step s", "MFU", "spare GiB", "layout; remat"]
    return "\n".join([title(plans[0].run), *table(heads, rows, text=(3,))])


def published_lines(p: Plan, row: dict | None) -> list[str]:
    """The published step, and the predicted one over it."""
    if row is None:
        return ["published: nothing for this workload, precision and GPU"]
    head = f"published: {row['step_s']} s on {row['gpus']} GPUs, {row['source']}: "
    if p.published.refusal:
        return [head + p.published.refusal]
    return [f"{head}{_predicted(row['over_published'])}"]


def _predicted(error: float) -> str:
    """'predicted +1.2%', or 'as predicted'."""
    text = console.change(error)
    return "as predicted" if text == "0.0%" else f"predicted {text}"


def fit_line(p: Plan) -> str:
    """'fits, 12.4 GiB spare', or the missing GiB and a remat policy that should fit."""
    spare = p.memory.spare / GIB
    if p.fits:
        return f"fits, {spare:.1f} GiB spare"
    fitting = remat.least_recomputed(p.run, memory.activation_bytes(p.run) + p.memory.spare)
    hint = "more fsdp, tp or cp; smaller mbs"
    if fitting:
        hint = f"--config.train.remat={fitting.train.remat}"
    return f"does not fit: {-spare:.1f} GiB over; try {hint}"
