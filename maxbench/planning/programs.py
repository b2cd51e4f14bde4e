"""Plans of programs that anyone wrote: of a factory, or of the text of a compiled program."""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from maxbench.config.errors import UserError
from maxbench.config.options import ProgramOptions
from maxbench.cost_model import buffer_liveness, costs, hlo, memory, simulate
from maxbench.cost_model.compile_cache import Compiled
from maxbench.cost_model.costs import PEAKS, Costs
from maxbench.cost_model.meaning import Meaning
from maxbench.cost_model.memory import ProgramMemory
from maxbench.cost_model.simulate import Timeline
from maxbench.evidence.error_band import ErrorBand, error_band
from maxbench.hardware.gpus import Efficiency, Gpu
from maxbench.planning.op_names import OpNames
from maxbench.planning.prediction import Prediction

NUMBER_FORMATS = {"bf16": "bf16", "fp8": "fp8", "fp4": "nvfp4"}  # peak -> format of error bands
# The state or another part of a program's arguments: "state.params", "args[0]", "params['layers']".
ARGUMENT = re.compile(r"^\w+(?:\.\w+|\['?\w+'?\])?")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """GPUs that a program runs on.

    Attributes:
      axes, order: as of factories.Found.
    """

    gpu_type: str
    gpu: Gpu
    axes: Mapping[str, int]
    order: tuple[int, ...] = ()

    @property
    def gpus(self) -> int:
        found = 1
        for size in self.axes.values():
            found *= size
        return found

    def costs(self, efficiency: Efficiency | None = None) -> Costs:
        return Costs(self.gpu, self.axes, efficiency, self.order)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramPlan(Prediction):
    """Prediction of the step of a program.

    Attributes:
      title: what was planned.
      given: what the caller says of loops, conditionals and kernels.
      layout: keywords of the factory in a search.
      estimated_memory: whether memory is that of live buffers, because the compiler's is not known.
    """

    memory: ProgramMemory
    title: str
    cluster: Cluster
    given: Meaning
    main_peak: str
    layout: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    estimated_memory: bool = False

    @property
    def name(self) -> str:
        layout = ", ".join(f"{name}={value}" for name, value in self.layout.items())
        return f"{self.title}({layout})" if layout else self.title

    @property
    def gpu_type(self) -> str:
        return self.cluster.gpu_type

    @property
    def gpu(self) -> Gpu:
        return self.cluster.gpu

    @property
    def peak(self) -> str:
        return self.main_peak

    @property
    def band(self) -> ErrorBand:
        return error_band(self.gpu_type, NUMBER_FORMATS[self.peak], gpu=self.gpu)

    def costs(self) -> Costs:
        return self.cluster.costs()

    def meaning(self, program: hlo.Program) -> Meaning:
        return meaning_of(program, self.given)

    def op_names(self, program: hlo.Program) -> OpNames:
        return OpNames(program)

    def simulate(
        self, program: hlo.Program, record: bool = False, efficiency: Efficiency | None = None
    ) -> Timeline:
        return simulate.simulate(
            program, self.cluster.costs(efficiency), self.meaning(program), record
        )

    def figures(self) -> dict[str, Any]:
        return super().figures() | {
            "gpus": self.cluster.gpus,
            "axes": {name: size for name, size in self.cluster.axes.items() if name},
            "layout": dict(self.layout),
            "format": NUMBER_FORMATS[self.peak],
            "executed_tflops_per_gpu": self.timeline.flops / self.step_s / 1e12,
            "memory_is_estimated": self.estimated_memory,
        }


def plan_program(
    title: str,
    compiled: Compiled,
    cluster: Cluster,
    given: Meaning,
    layout: Mapping[str, Any] | None = None,
    memory_is_known: bool = True,
) -> ProgramPlan:
    """The plan of a compiled program.

    Raises:
      UserError: it is of another number of GPUs, or `given` names something that it has not.
    """
    program = hlo.parse(compiled.text)
    if program.devices != cluster.gpus:
        raise UserError(
            f"{title} is a program of {program.devices} GPUs, not of {cluster.gpus}: use "
            f"--gpus {program.devices}, or a mesh of all devices"
        )
    check_names(program, given)
    prices, meaning = cluster.costs(), meaning_of(program, given)
    timeline = simulate.simulate(program, prices, meaning)
    if not timeline.seconds:
        raise UserError(f"{title} runs no kernel: it is empty, or its results are constants")
    if not memory_is_known:
        compiled = _with_live_buffers(program, compiled, prices, meaning)
    return ProgramPlan(
        compiled=compiled,
        memory=ProgramMemory(
            compiled.arguments, compiled.results, compiled.temporaries, memory.capacity(cluster.gpu)
        ),
        timeline=timeline,
        title=title,
        cluster=cluster,
        given=given,
        main_peak=_main_peak(program, timeline),
        layout=layout or {},
        estimated_memory=not memory_is_known,
    )


def given_by(asked: ProgramOptions) -> Meaning:
    """Lengths, shares and prices that options give for loops, conditionals and kernels."""
    return Meaning(trip_counts=asked.trip_count, branches=asked.branch, prices=asked.price)


def check_names(program: hlo.Program, given: Meaning) -> None:
    """Raises UserError for a name that no op of its kind has, or a wrong number of branches."""
    kinds: dict[str, tuple[Mapping[str, Any], list[hlo.Op]]] = {
        "trip_count": (given.trip_counts, [op for op in _ops(program) if op.opcode == "while"]),
        "branch": (given.branches, [op for op in _ops(program) if op.opcode == "conditional"]),
        "price": (given.prices, [op for op in _ops(program) if not costs.has_price(op)]),
    }
    for option, (values, ops) in kinds.items():
        for name, value in values.items():
            meant = [op for op in ops if name in op.names]
            if not meant:
                known = sorted({next(filter(None, op.names)) for op in ops})
                raise UserError(f"{option}={name!r}: the program has {', '.join(known) or 'none'}")
            for op in meant if option == "branch" else ():
                if len(value) != len(op.branches):
                    raise UserError(
                        f"branch={name!r} has {len(value)} shares, and the conditional has "
                        f"{len(op.branches)} branches"
                    )


def _ops(program: hlo.Program) -> Iterator[hlo.Op]:
    return (op for where in program.computations.values() for op in where.ops)


def meaning_of(program: hlo.Program, given: Meaning) -> Meaning:
    """`given`, with labels of ops and arguments for drawings."""
    parameters = [op.op_name for op in program.entry.ops if op.opcode == "parameter"]
    groups = {found[0] for name in parameters if (found := ARGUMENT.search(name))}
    longest_first = sorted(groups, key=len, reverse=True)
    return dataclasses.replace(
        given,
        label=functools.cache(OpNames(program).module),
        arguments={re.compile(f"^{re.escape(group)}"): group for group in longest_first},
    )


def _main_peak(program: hlo.Program, timeline: Timeline) -> str:
    """The peak of the number format that most FLOPs of GEMMs have."""
    flops: collections.Counter[str] = collections.Counter()
    for t in timeline.ops.values():
        if t.kind == "gemm" and t.op:
            fused = t.op.base == "fusion"
            where = program.called(t.op) if fused else t.where
            gemms = (op for op in (where.ops if fused else [t.op]) if costs.is_gemm(op))
            dtype = costs.gemm_sizes(where, next(gemms))[4]
            flops[PEAKS.get(dtype, "bf16")] += int(t.flops * t.count)
    return max(flops, key=flops.__getitem__, default="bf16")


def _with_live_buffers(
    program: hlo.Program, compiled: Compiled, prices: Costs, meaning: Meaning
) -> Compiled:
    """The program with an estimate of its memory: arguments, and the peak of live buffers."""
    shapes = (op.shape for op in program.entry.ops if op.opcode == "parameter")
    arguments = sum(s.bytes for shape in shapes for s in hlo.leaves(shape) if not s.host)
    live = max(buffer_liveness.liveness(program, prices, meaning).total())
    temporaries = max(0, live - arguments)
    return dataclasses.replace(compiled, arguments=arguments, temporaries=temporaries)
