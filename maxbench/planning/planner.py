"""A run that is not here: its program, what that occupies, its predicted step, and the screen."""

import dataclasses
import sys
from collections.abc import Sequence

from maxbench.config import environment, recipes
from maxbench.config.errors import UserError
from maxbench.config.run import AXES, Run
from maxbench.cost_model import (
    compile_cache,
    hlo,
    memory,
    pipeline_timing,
    published_deltas,
    simulate,
)
from maxbench.cost_model.compile_cache import Compiled
from maxbench.cost_model.costs import Costs
from maxbench.cost_model.memory import GIB, Memory
from maxbench.cost_model.simulate import Timeline
from maxbench.hardware.gpus import Efficiency
from maxbench.hardware.published import Comparison, ErrorBand, error_band, parallelism
from maxbench.metrics import step_stats
from maxbench.pipeline.schedule import schedule_for

PARTS = {  # of a predicted step: figures()["parts_s"] -> what it is called
    "gemm": "matrix products",
    "attention": "attention",
    "memory": "memory-bound kernels",
    "amax": "passes for FP8 scales",
    "copy": "copies, nothing computed",
    "offload": "waiting for the host's memory",
    "launch": "gaps between kernels",
    "host": "the host decides what runs",
    "contention": "slower beside communication",
    "slowest": "waiting for the slowest GPU",
    "exposed": "exposed communication",
    "idle": "pipeline idle",
}
PURPOSES = ("weights", "optimizer", "gradients", "activations", "workspace")  # of Memory
CLUSTER = {  # for sensitivity(): a part of the cluster -> fields of Efficiency
    "network bandwidth": ("network",),
    "NVLink bandwidth": ("nvlink",),
    "memory bandwidth": ("memory",),
    "matrix products": ("gemm_bf16", "gemm_fp8"),
    "latency of links": ("network_us", "nvlink_us"),
}
FACTORS = (0.5, 0.8, 1.25, 2.0)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run, what its program occupies, and its predicted step.

    `beside` is the published row of the same work, or the nearest one; `terms` are seconds by which
    the row's program differs, none without a row of the same work.
    """

    run: Run
    compiled: Compiled
    memory: Memory
    timeline: Timeline
    published: Comparison
    terms: dict[str, float]
    cached: bool

    @property
    def step_s(self) -> float:
        return self.timeline.seconds

    @property
    def fits(self) -> bool:
        return self.memory.spare >= 0

    @property
    def band(self) -> ErrorBand:
        """How far off predictions like this one are."""
        a, run = self.run.layout, self.run
        kind = parallelism(bool(run.model.experts), a.pp, a.tp, a.fsdp)
        return error_band(a.gpu_type, run.precision.dtype, kind)


def plan(run: Run) -> Plan:
    """Plans a run; compiles it unless the cache has its program.

    Raises:
      UserError: the GPU compiler is not installed.
    """
    compiled = compile_cache.load(run)
    cached = compiled is not None
    if compiled is None:
        compile_cache.require_compiler()
        if "jax" not in sys.modules:
            environment.set_for_compile_only()
        from maxbench.cost_model import aot  # late: what is cached is planned without jax

        compiled = aot.compile_run(run)
        compile_cache.store(run, compiled)
    program = hlo.parse(compiled.text)
    timeline = simulate_plan(run, program)
    beside = step_stats.compare_with_published(run, run.layout.gpu_type)
    differs = (
        {} if beside.refusal else published_deltas.terms(run, timeline, beside.row, costs_of(run))
    )
    split = memory.breakdown(run, compiled, program)
    return Plan(run, compiled, split, timeline, beside, differs, cached)


def simulate_plan(
    run: Run, program: hlo.Program, record=False, efficiency: Efficiency | None = None
) -> Timeline:
    """The program's predicted step; `efficiency` in place of the GPU type's own."""
    costs = costs_of(run, efficiency)
    first = (
        simulate.simulate(program, costs, branch_frequencies(run, program))
        if run.layout.pp > 1
        else None
    )
    return simulate.simulate(program, costs, branch_frequencies(run, program, first), record)


def branch_frequencies(
    run: Run, program: hlo.Program, first: Timeline | None = None
) -> simulate.BranchFrequencies:
    """What a run's schedule says of its program's loops, for simulate.play; `first` as in ticks."""
    return pipeline_timing.branch_frequencies(schedule_for(run), program, first)


def costs_of(run: Run, efficiency: Efficiency | None = None) -> Costs:
    """Prices for the run's GPU type and layout."""
    return Costs(run.gpu, {axis: getattr(run.layout, axis) for axis in AXES}, efficiency)


def sensitivity(p: Plan) -> dict[str, list[float]]:
    """Seconds of a step if a part of the cluster were slower or faster by each of FACTORS."""
    program, efficiency = hlo.parse(p.compiled.text), p.run.gpu.efficiency

    def seconds(names, factor):
        other = {name: getattr(efficiency, name) * factor for name in names}
        return simulate_plan(
            p.run, program, efficiency=dataclasses.replace(efficiency, **other)
        ).seconds

    return {part: [seconds(names, f) for f in FACTORS] for part, names in CLUSTER.items()}


def best_remat(run: Run) -> Plan:
    """The plan with the policy that computes least again and still fits, in the room that is left
    with as few layers as need it; else the policy that keeps least.

    What a policy keeps is arithmetic, so three or four programs are compiled, not all.
    """
    most, *_, least = memory.policies(run)
    last, layer = plan(least), memory.activation_bytes(most) / run.model.layers  # made again: whole
    room = last.memory.spare + memory.activation_bytes(least) + layer
    tried = sorted(memory.policies(run, room * 1.05), key=memory.recomputed)
    plans = (plan(one) for one in tried if one != least)
    found = next((p for p in plans if p.fits), last)
    room = 0.95 * found.memory.spare
    while (more := memory.with_more(found.run, room)) != found.run:
        made = plan(more)
        if made.fits:
            return made
        room *= 0.95 * found.memory.spare / (made.memory.total - found.memory.total)
    return found


def figures(p: Plan) -> dict:
    """The plan as plain data, for machines; seconds and bytes unless a name says otherwise."""
    run, t = p.run, p.timeline
    traffic = [
        {"kind": x.kind, "axes": x.link.axes, "link": x.link.name, "members": x.link.members}
        | {"count": round(x.count), "bytes": round(x.bytes)}
        | {"busy_s": x.busy_s, "exposed_s": x.exposed_s}
        for x in t.traffic.values()
    ]
    peak = run.gpu.peak_tflops(run.format.peak)
    parts = dict(t.compute) | {"exposed": t.exposed_s, "idle": t.idle_s}
    return {
        "name": run.name,
        "layout": run.layout.describe(),
        "gpu_type": run.layout.gpu_type,
        "remat": run.train.remat,
        "attention": p.compiled.attention,
        "fits": p.fits,
        "memory": dataclasses.asdict(p.memory)
        | {"total": p.memory.total, "spare": p.memory.spare}
        | {"host": p.compiled.host},
        "communication": traffic,
        "step_s": t.seconds,
        "band_s": {"low": t.seconds / p.band.factor, "high": t.seconds * p.band.factor}
        | {"rows_like_it": p.band.like, "programs": p.band.programs, "validated": p.band.validated},
        "parts_s": parts,
        **step_stats.performance_figures(run, run.layout.gpu_type, t.seconds),
        "hfu": t.flops / t.seconds / 1e12 / peak,
        "published": comparison(p),
        "terms_s": p.terms,
        "compile": {
            "lower_s": p.compiled.lower_s,
            "compile_s": p.compiled.compile_s,
            "peak_rss_gib": p.compiled.peak_rss_gib,
            "cached": p.cached,
            "versions": compile_cache.versions(),
        },
        "config": run.asdict(),
    }


def comparison(p: Plan) -> dict | None:
    """The predicted step beside the published one, as compiled and without the terms."""
    beside = p.published
    if beside.row is None:
        return None
    found = beside.about | {"differences": beside.differences}
    if not beside.refusal:
        step_s, less = beside.row.step_s, p.step_s - sum(p.terms.values())
        found["as_published_s"] = less
        found |= {"error": p.step_s / step_s - 1, "error_as_published": less / step_s - 1}
    return found


def as_published(run: Run) -> Run:
    """The run with the published run's recomputation, whether or not it fits; and in its
    microbatches, where it is the same work.

    Raises:
      UserError: nothing is published for this workload, precision and GPU.
    """
    beside = step_stats.compare_with_published(run, run.layout.gpu_type)
    if beside.row is None:
        name = f"{run.model.name} {run.model.size} {run.precision.dtype} on {run.layout.gpu_type}"
        raise UserError(f"as_published: nothing is published for {name}; leave the flag out")
    if not beside.refusal:
        run = dataclasses.replace(run, layout=dataclasses.replace(run.layout, mbs=beside.row.mbs))
    return memory.with_remat(run, beside.row.remat)


def format_plan(p: Plan, more: Sequence[str] = ()) -> str:
    """The plan on one screen; `more` lines stand below its answer."""
    run, m, t, f = p.run, p.memory, p.timeline, figures(p)
    traffic = sorted(t.traffic.values(), key=lambda x: -x.busy_s)
    parts = {text: f["parts_s"].get(part, 0.0) for part, text in PARTS.items()}
    mfu, rate = f["mfu"], f["tflops_per_gpu"]
    how = run.precision
    quantized = f", {how.dtype} {how.backend} {run.format.name}" if run.format.quantized else ""
    lines = [
        title(run),
        f"{run.layout.describe()}; remat {run.train.remat_summary}, attention {p.compiled.attention}"
        + quantized,
        "",
        *headline(p, f),
        *more,
        "",
        f"memory per GPU      {m.total / GIB:8.2f} GiB of {m.capacity / GIB:.2f}",
        *(f"  {name:<18}{getattr(m, name) / GIB:8.2f} GiB" for name in PURPOSES),
        *([f"in the host's       {p.compiled.host / GIB:8.2f} GiB"] if p.compiled.host else []),
        "",
        "communication of one GPU    over    link        times       GiB   busy s  exposed",
        *(
            f"  {x.kind:<18}{x.link.axes:>12}    {x.link.name:<8}{round(x.count):>9}"
            f"{x.bytes / GIB:>10.2f}{x.busy_s:>9.3f}{x.exposed_s:>9.3f}"
            for x in traffic
        ),
        "",
        f"predicted step      {t.seconds:10.3f} s",
        *(f"  {text:<28}{s:8.3f} s {s / t.seconds:6.1%}" for text, s in parts.items() if s),
        "TFLOP/s per GPU     "
        + ", ".join(f"{rate[c]:.1f} ({c}, MFU {mfu[c]:.1%})" for c in mfu)
        + f"; executed {f['hfu']:.1%} of peak",
        *published_lines(p, f["published"]),
        f"compiled in {p.compiled.lower_s + p.compiled.compile_s:.1f} s"
        + (", from the cache" if p.cached else ""),
    ]
    return "\n".join(lines)


def sensitivities(p: Plan, found: dict[str, list[float | None]]) -> str:
    """The table of sensitivity()."""
    head = "".join(f"{f'x {f}':>16}" for f in FACTORS)
    change = lambda s: f"{s:7.3f} s {s / p.step_s - 1:+6.1%}" if s else f"{'does not fit':>16}"
    rows = [f"{part:<20}" + "".join(map(change, row)) for part, row in found.items()]
    return "\n".join([f"{'a step with':<20}{head}", *rows])


def title(run: Run) -> str:
    """'Llama 3.1 405B bf16, 126 layers, seq 8192, on 512 x H100'."""
    m, a, name = run.model, run.layout, recipes.display_name(run.model.name, run.model.size)
    return (
        f"{name} {run.precision.dtype}, {m.layers} layers, seq {run.train.seq}, on "
        f"{a.gpus} x {a.gpu_type.upper()}"
    )


def headline(p: Plan, f: dict) -> list[str]:
    """What was asked: whether it fits, how fast it is, how long it takes, and against what."""
    speed = f"{p.step_s:.3f} s a step, {f['tokens_per_s']:,.0f} tokens/s, "
    speed += f"{f['days_to_1t_tokens']:,.1f} days to 1T tokens, MFU {f['mfu']['full']:.1%}"
    lines = [fit_line(p), speed if p.fits else f"with the memory it would be {speed}"]
    lines += [error_band_line(p)]
    row = f["published"]
    if row and not p.published.refusal:
        faster = "faster" if row["error"] < 0 else "slower"
        lines += [f"{abs(row['error']):.1%} {faster} than published ({row['step_s']} s)"]
    return lines


def error_band_line(p: Plan) -> str:
    """'6.6 to 7.5 s in nine of ten published rows like it (h100 bf16 fsdp, 3 programs)'."""
    b, gpu = p.band, p.run.layout.gpu_type
    span = f"{p.step_s / b.factor:.3g} to {p.step_s * b.factor:.3g} s"
    text = (
        f"{span} in nine of ten published rows like it ({b.like or 'all'}, {b.programs} programs)"
    )
    return text if b.validated else f"{text}; unvalidated for {gpu.upper()}"


def ranking(plans: list[Plan], given: Run) -> str:
    """Plans that fit, fastest first, then those that do not."""
    lines = [title(plans[0].run), f"{'step s':>9} {'MFU':>6} {'spare GiB':>10}  layout; remat"]
    for p in sorted(plans, key=lambda p: (not p.fits, p.step_s)):
        mark = "  (as given)" if p.run == given else ""
        lines.append(
            f"{p.step_s:9.3f} {figures(p)['mfu']['full']:6.1%} {p.memory.spare / GIB:10.1f}  "
            f"{p.run.layout.describe()}; {p.run.train.remat_summary}{mark}"
        )
    return "\n".join(lines)


def published_lines(p: Plan, row: dict | None) -> list[str]:
    """The published step, and what that run did otherwise, from a thousandth of the step on."""
    if row is None:
        return ["published           nothing for this workload, precision and GPU"]
    head = f"published           {row['step_s']} s on {row['gpus']} GPUs, {row['source']}: "
    if p.published.refusal:
        return [head + p.published.refusal]
    shown = {name: s for name, s in p.terms.items() if abs(s) > 1e-3 * p.step_s}
    lines = [f"{head}predicted {row['error']:+.1%}"]
    lines += [f"  without {name:<20}{-seconds:+8.3f} s" for name, seconds in shown.items()]
    less = f"  {'as published':<28}{row['as_published_s']:8.3f} s: predicted "
    return lines + ([f"{less}{row['error_as_published']:+.1%}"] if shown else [])


def fit_line(p: Plan) -> str:
    """'fits, 12.4 GiB spare', or by how much it does not and what would."""
    spare = p.memory.spare / GIB
    if p.fits:
        return f"fits, {spare:.1f} GiB spare"
    # What is over has to go from what this policy keeps, both by the same arithmetic.
    would = memory.least_recomputed(p.run, memory.activation_bytes(p.run) + p.memory.spare)
    other = "more fsdp, tp or cp; smaller mbs"
    hint = f"--config.train.remat={would.train.remat}" if would else other
    return f"does not fit: {-spare:.1f} GiB over; what would: {hint}"
