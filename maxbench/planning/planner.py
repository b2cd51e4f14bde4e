"""Plan of a run: its compiled program, memory on a GPU, and predicted step."""

import dataclasses

from maxbench.config import resolve
from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.cost_model import buffer_liveness, compile_cache, hlo, memory, remat, simulate
from maxbench.cost_model.compile_cache import Compiled
from maxbench.cost_model.costs import Costs
from maxbench.cost_model.meaning import Meaning
from maxbench.cost_model.memory import Memory
from maxbench.cost_model.simulate import Timeline
from maxbench.evidence import published_deltas
from maxbench.evidence.error_band import ErrorBand, error_band, parallelism
from maxbench.evidence.published import Comparison, compare_run
from maxbench.hardware.gpus import Efficiency
from maxbench.metrics import step_stats
from maxbench.pipeline.schedule import schedule_for
from maxbench.planning import compile_process, pipeline_timing, program_names

SENSITIVITY = {  # part of the cluster -> fields of Efficiency
    "network bandwidth": ("network",),
    "NVLink bandwidth": ("nvlink",),
    "memory bandwidth": ("memory",),
    "GEMMs": ("gemm_bf16", "gemm_fp8", "gemm_fp4"),
    "latency of links": ("network_us", "nvlink_us"),
}
FACTORS = (0.5, 0.8, 1.25, 2.0)  # of a bandwidth, rate or latency in sensitivity()


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run, its compiled program, memory on one GPU, and predicted step.

    Attributes:
      published: the published row of the same work, or the nearest one.
      deltas: published_deltas.deltas() of that row, empty if they do not apply to it.
      cached: whether the program was in the cache.
    """

    run: Run
    compiled: Compiled
    memory: Memory
    timeline: Timeline
    published: Comparison
    deltas: dict[str, float]
    cached: bool

    @property
    def step_s(self) -> float:
        return self.timeline.seconds

    @property
    def fits(self) -> bool:
        return self.memory.spare >= 0

    @property
    def band(self) -> ErrorBand:
        """Error band of predictions of this GPU type, precision and parallelism, or that of the
        file of --hardware that has the type's fitted constants."""
        a, run = self.run.layout, self.run
        if run.gpu.band:
            low, high = run.gpu.band
            return ErrorBand(low, high, "runs that the constants were fitted to", 0, True)
        kind = parallelism(run.model.has_experts, a.pp, a.tp, a.fsdp)
        return error_band(a.gpu_type, run.precision.dtype, kind)


def plan(run: Run) -> Plan:
    """Plans a run. Compiles it if its program is not in the cache.

    Raises:
      UserError: XLA's GPU compiler is not installed.
    """
    compiled, cached = compile_program(run)
    program = hlo.parse(compiled.text)
    timeline = simulate_plan(run, program)
    published = compare_run(run, run.layout.gpu_type)
    deltas = {}
    if published.row and published_deltas.apply_to(published):
        deltas = published_deltas.deltas(run, timeline, published.row, costs_of(run))
    sizes = memory.breakdown(run, compiled, program, program_names.meaning(run))
    return Plan(run, compiled, sizes, timeline, published, deltas, cached)


def compile_program(run: Run) -> tuple[Compiled, bool]:
    """The run's program, and whether it was in the cache. Compiles it and caches it if not.

    Raises:
      UserError: XLA's GPU compiler is not installed, or cannot compile the run here.
    """
    if cached := compile_cache.load(run):
        return cached, True
    with compile_process.CompileProcess(run) as process:
        return process.result(), False


def simulate_plan(
    run: Run, program: hlo.Program, record: bool = False, efficiency: Efficiency | None = None
) -> Timeline:
    """The program's predicted step.

    A pipeline is simulated twice: lengths of branches from the first time determine their
    frequencies in the second.

    Args:
      record: keep the events, for drawing.
      efficiency: replaces the GPU type's own.
    """
    costs, first_pass = costs_of(run, efficiency), None
    if run.layout.pp > 1:
        first_pass = simulate.simulate(program, costs, meaning_of(run, program))
    return simulate.simulate(program, costs, meaning_of(run, program, first_pass), record)


def liveness(run: Run, program: hlo.Program) -> buffer_liveness.Liveness:
    """The program's live buffers over a step."""
    return buffer_liveness.liveness(program, costs_of(run), meaning_of(run, program))


def meaning_of(run: Run, program: hlo.Program, first_pass: Timeline | None = None) -> Meaning:
    """Meaning of the names in the run's program, with pipeline_timing.branch_frequencies() of its
    schedule."""
    plan, others = schedule_for(run), 0.0
    if len(run.model.kinds) > 1 or not run.layout.even:
        from maxbench.pipeline import layer_order  # late: it loads jax, which cached plans need not

        others = layer_order.other_kinds(run, plan)
    frequencies = pipeline_timing.branch_frequencies(plan, program, first_pass, others)
    return program_names.meaning(run, frequencies)


def costs_of(run: Run, efficiency: Efficiency | None = None) -> Costs:
    """Costs of ops on the run's GPU type and mesh."""
    return Costs(run.gpu, run.layout.mesh_shape, efficiency)


def sensitivity(p: Plan) -> dict[str, list[float]]:
    """Part of the cluster -> seconds of a step with it scaled by each of FACTORS."""
    program, efficiency = hlo.parse(p.compiled.text), p.run.gpu.efficiency

    def seconds(names, factor):
        scaled = {name: getattr(efficiency, name) * factor for name in names}
        changed = dataclasses.replace(efficiency, **scaled)
        return simulate_plan(p.run, program, efficiency=changed).seconds

    return {part: [seconds(names, f) for f in FACTORS] for part, names in SENSITIVITY.items()}


def best_remat(run: Run) -> Plan:
    """The plan of the policy that fits and recomputes least, in as few layers as memory requires.
    If no policy fits, that of the policy with the smallest stash.

    Stash sizes of policies are estimated, so only three or four programs are compiled.
    """
    largest, *_, smallest = remat.policies(run)
    smallest_plan = plan(smallest)
    # Policies may exceed the spare bytes by a layer's activations: the backward pass of a fully
    # recomputed layer has them all.
    layer = memory.activation_bytes(largest) / run.model.layers
    available = smallest_plan.memory.spare + memory.activation_bytes(smallest) + layer
    candidates = sorted(remat.policies(run, available * 1.05), key=remat.recomputed_fraction)
    plans = (plan(candidate) for candidate in candidates if candidate != smallest)
    best = next((p for p in plans if p.fits), smallest_plan)
    if not best.fits:
        return best
    available = 0.95 * best.memory.spare
    while (fewer := remat.with_fewer_layers(best.run, available)) != best.run:
        fewer_plan = plan(fewer)
        if fewer_plan.fits:
            return fewer_plan
        # Scale the next attempt by the growth that was compiled.
        grown = fewer_plan.memory.total - best.memory.total
        available *= 0.95 * best.memory.spare / grown
    return best


def figures(p: Plan) -> dict:
    """The plan as plain data for JSON; seconds and bytes unless a name has another unit."""
    run, t = p.run, p.timeline
    traffic = [
        {
            "kind": x.kind,
            "axes": x.link.axes,
            "link": x.link.name,
            "members": x.link.members,
            "count": round(x.count),
            "bytes": round(x.bytes),
            "busy_s": x.busy_s,
            "exposed_s": x.exposed_s,
        }
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
        "band_s": {"low": t.seconds * p.band.low, "high": t.seconds * p.band.high}
        | {"rows_like_it": p.band.like, "programs": p.band.programs, "validated": p.band.validated},
        "parts_s": parts,
        "unknown_loops": [*t.unknown_loops.values()],
        **step_stats.performance_figures(run, run.layout.gpu_type, t.seconds),
        "hfu": t.flops / t.seconds / 1e12 / peak,
        "published": comparison(p),
        "deltas_s": p.deltas,
        "compile": {
            "lower_s": p.compiled.lower_s,
            "compile_s": p.compiled.compile_s,
            "peak_rss_gib": p.compiled.peak_rss_gib,
            "cached": p.cached,
            "versions": compile_cache.versions(),
        },
        "config": run.config.asdict(),
        "run": run.asdict(),
    }


def comparison(p: Plan) -> dict | None:
    """The published row, with the errors of the prediction: as compiled, and as published (without
    the deltas, where they apply). None without a row."""
    published = p.published
    if published.row is None:
        return None
    about = published.about | {"differences": published.differences}
    if published.refusal:
        return about
    step_s, as_published_s = published.row.step_s, p.step_s - sum(p.deltas.values())
    about |= {"error": p.step_s / step_s - 1}
    if published_deltas.apply_to(published):
        about |= {
            "as_published_s": as_published_s,
            "error_as_published": as_published_s / step_s - 1,
        }
    return about


def as_published(run: Run) -> Run:
    """The run with the published run's remat policy, whether or not it fits, and with its
    microbatch size if it is the same work.

    Raises:
      UserError: nothing is published for this workload, precision and GPU.
    """
    published = compare_run(run, run.layout.gpu_type)
    if published.row is None:
        name = f"{run.model.name} {run.model.size} {run.precision.dtype} on {run.layout.gpu_type}"
        raise UserError(f"as_published: nothing is published for {name}; leave the flag out")
    if not published.refusal:
        run = resolve.changed(run, layout={"mbs": published.row.mbs})
    return remat.with_remat(run, published.row.remat)
