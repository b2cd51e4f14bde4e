"""Plan of a run: its compiled program, memory on a GPU, and predicted step."""

import dataclasses
from typing import Any

from maxbench.config import resolve
from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.cost_model import compile_cache, hlo, memory, remat, simulate
from maxbench.cost_model.compile_cache import CompiledStep
from maxbench.cost_model.costs import Costs
from maxbench.cost_model.meaning import Meaning
from maxbench.cost_model.memory import Memory
from maxbench.cost_model.simulate import Timeline
from maxbench.evidence.error_band import ErrorBand, error_band
from maxbench.evidence.published import Comparison, compare_run
from maxbench.hardware.gpus import Efficiency, Gpu
from maxbench.metrics import step_stats
from maxbench.pipeline.schedule import schedule_for
from maxbench.planning import compile_process, pipeline_timing, program_names
from maxbench.planning.op_names import OpNames
from maxbench.planning.prediction import Prediction


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Prediction):
    """Prediction of a run's step.

    Attributes:
      published: the published row of the same work, or the nearest one.
    """

    compiled: CompiledStep
    memory: Memory
    run: Run
    published: Comparison

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def gpu_type(self) -> str:
        return self.run.layout.gpu_type

    @property
    def gpu(self) -> Gpu:
        return self.run.gpu

    @property
    def peak(self) -> str:
        return self.run.format.peak

    @property
    def band(self) -> ErrorBand:
        return error_band(self.gpu_type, self.run.precision.dtype, gpu=self.gpu)

    @property
    def ticks(self) -> int:
        return schedule_for(self.run).ticks if self.run.layout.pp > 1 else 0

    def costs(self) -> Costs:
        return costs_of(self.run)

    def meaning(self, program: hlo.Program) -> Meaning:
        return meaning_of(self.run, program)

    def op_names(self, program: hlo.Program) -> OpNames:
        return program_names.RunNames(program)

    def simulate(
        self, program: hlo.Program, record: bool = False, efficiency: Efficiency | None = None
    ) -> Timeline:
        return simulate_plan(self.run, program, record, efficiency)

    def figures(self) -> dict[str, Any]:
        run = self.run
        return super().figures() | {
            "layout": run.layout.describe(),
            "remat": run.train.remat,
            "attention": self.compiled.attention,
            **step_stats.performance_figures(run, self.gpu_type, self.step_s),
            "published": comparison(self),
            "config": run.config.asdict(),
            "run": run.asdict(),
        }


def plan(run: Run) -> Plan:
    """Plans a run. Compiles it if its program is not in the cache.

    Raises:
      UserError: XLA's GPU compiler is not installed.
    """
    compiled, cached = compile_program(run)
    program = hlo.parse(compiled.text)
    timeline = simulate_plan(run, program)
    published = compare_run(run, run.layout.gpu_type)
    sizes = memory.breakdown(run, compiled, program, program_names.meaning(run))
    return Plan(
        compiled=compiled, memory=sizes, timeline=timeline, cached=cached,
        run=run, published=published,
    )  # fmt: skip


def compile_program(run: Run) -> tuple[CompiledStep, bool]:
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

    Args:
      record: keep the events, for drawing.
      efficiency: replaces the GPU type's own.
    """
    costs = costs_of(run, efficiency)
    return simulate.simulate(program, costs, scheduled_meaning(run, program, costs), record)


def scheduled_meaning(run: Run, program: hlo.Program, costs: Costs) -> Meaning:
    """Meaning of the names in the run's program, with the frequencies of its branches.

    A pipeline is simulated for them: lengths of branches determine their frequencies.
    """
    first_pass = None
    if run.layout.pp > 1:
        first_pass = simulate.simulate(program, costs, meaning_of(run, program))
    return meaning_of(run, program, first_pass)


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


def comparison(p: Plan) -> dict | None:
    """The published row, and the predicted step over it, less 1. None without a row.

    This is no error: the published step is of another program for the same work.
    """
    published = p.published
    if published.row is None:
        return None
    about = published.about | {"differences": published.differences}
    if published.refusal:
        return about
    return about | {"over_published": p.step_s / published.row.step_s - 1}


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
