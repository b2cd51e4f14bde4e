"""Constants fitted to runs that are over: what `maxbench plan --calibrate RUN ...` says and writes.

Every run's program is compiled as plan does, and played. Constants are taken in the order in which
they move these runs, and no more of them than the runs can settle.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence

from maxbench.calibration import fit
from maxbench.calibration.fit import Observation
from maxbench.config.errors import UserError
from maxbench.config.run import Run, Train
from maxbench.cost_model import compile_cache, hlo
from maxbench.hardware.gpus import GPU_TYPES, Efficiency, GpuTypes, PeakFraction
from maxbench.planning import planner
from maxbench.run_logs import readers
from maxbench.run_logs.record import RunRecord, dig

PROGRAMS = 2  # that differ, for each constant
FAR = 2.0  # the largest factor by which a constant is moved
TRIED = 1.2  # by which it is moved to see what depends on it
MATTERS = 0.005  # share of a step that must then change
MOST = 4  # constants: with more, errors of the model pass for constants
TANGENTS = 2  # times that the step is made linear in the constants


@dataclasses.dataclass(frozen=True)
class RunFit:
    """What runs taught about a GPU type.

    Attributes:
      before, efficiency: its constants as they were, and as they are now.
      moves: constant -> the largest share of a step that a fifth of it moves, the first first;
        `names` are those that were fitted.
      cases: programs that differ, the median of their runs.
      left_out: error of each program by constants that all others gave.
    """

    gpu_type: str
    runs: int
    before: Efficiency
    efficiency: Efficiency
    moves: dict[str, float]
    names: list[str]
    cases: list[Observation]
    left_out: list[float]


def fit_runs(paths: Sequence[str], gpu_types: GpuTypes = GPU_TYPES) -> RunFit:
    """Fits what runs can settle.

    Args:
      paths: of result.json, or of folders that hold some.
      gpu_types: those that the runs may name.

    Raises:
      UserError: a run that cannot be taken, or too few.
    """
    runs = [finished(record, gpu_types) for record in readers.read(paths, gpu_types)]
    kinds = sorted({run.layout.gpu_type for run, _ in runs})
    if len(kinds) > 1:
        raise UserError(f"calibrate: the runs are of {', '.join(kinds)}; give those of one type")
    seconds: dict[str, list[float]] = {}
    for run, step_s in runs:
        seconds.setdefault(compile_cache.key(run), []).append(step_s)
    if len(seconds) < PROGRAMS:
        raise UserError(
            f"calibrate: {len(runs)} run{'s' * (len(runs) > 1)} of {len(seconds)} program; "
            f"{PROGRAMS} programs that differ (in layout, batch, sequence, layers or dtype) settle "
            f"one constant, {2 * PROGRAMS} two, and so on"
        )
    programs = {compile_cache.key(run): run for run, _ in runs}
    cases = [case(run, statistics.median(seconds[key])) for key, run in programs.items()]
    before = gpu_types[kinds[0]].efficiency
    moves = {f.name: sensitivity(f.name, cases, before) for f in dataclasses.fields(Efficiency)}
    moves = dict(sorted(moves.items(), key=lambda item: -item[1]))
    names = [name for name, share in moves.items() if share > MATTERS]
    names = names[: min(MOST, len(cases) // PROGRAMS)]
    efficiency, near = before, cases
    for _ in range(TANGENTS):
        near = [linearize(case, names, efficiency) for case in cases]
        efficiency, _ = fit.fit(dict.fromkeys(names, near), before, FAR)
    left_out = []
    for i, case_ in enumerate(near):
        others = near[:i] + near[i + 1 :]
        left_out.append(case_.error(fit.fit(dict.fromkeys(names, others), before, FAR)[0]))
    return RunFit(kinds[0], len(runs), before, efficiency, moves, names, cases, left_out)


def finished(r: RunRecord, gpu_types: GpuTypes) -> tuple[Run, float]:
    """A finished run, and the median of its steps.

    Raises:
      UserError: it is none, or nothing that plan could predict.
    """
    try:
        run = r.to_run(gpu_types)
    except UserError as e:
        raise UserError(f"calibrate: {str(r.path)!r}: {e}") from None
    step_s = dig(r.result, "step_s.median", 0.0)
    if r.status != "done" or not step_s:
        raise UserError(f"calibrate: {str(r.path)!r} is {r.status!r}; give runs that are 'done'")
    # The number of steps only bends the learning rate.
    train = dataclasses.replace(run.train, steps=Train.steps)
    return dataclasses.replace(run, train=train), step_s


def case(run: Run, seconds: float) -> Observation:
    """What is predicted of a run beside what it took."""
    program = hlo.parse(planner.plan(run).compiled.text)
    predict = functools.cache(
        lambda efficiency: planner.simulate_plan(run, program, efficiency=efficiency).seconds
    )
    words = f"{run.model.name} {run.model.size} {run.precision.dtype}"
    return Observation(f"{words}, {run.layout.describe()}", seconds, predict)


def sensitivity(name: str, cases: Sequence[Observation], efficiency: Efficiency) -> float:
    """The largest share of a step that a constant moves."""
    other = fit.with_constant(efficiency, name, getattr(efficiency, name) / TRIED)
    return max(abs(math.log(case.predict(other) / case.predict(efficiency))) for case in cases)


def linearize(case: Observation, names: Sequence[str], efficiency: Efficiency) -> Observation:
    """A case that is linear in what a step adds up: latencies, and the inverses of rates."""

    def term(name: str, at: Efficiency) -> float:
        value = getattr(at, name)
        return 1 / value if Efficiency.__dataclass_fields__[name].type is PeakFraction else value

    seconds, slopes = case.predict(efficiency), {}
    for name in names:
        other = fit.with_constant(efficiency, name, getattr(efficiency, name) / TRIED)
        step = term(name, other) - term(name, efficiency)
        slopes[name] = (case.predict(other) - seconds) / step

    def predict(at: Efficiency) -> float:
        change = (slopes[name] * (term(name, at) - term(name, efficiency)) for name in names)
        return max(seconds + sum(change), 1e-3 * seconds)

    return Observation(case.name, case.seconds, predict)


def screen(found: RunFit) -> str:
    """What was fitted, by how much the error fell, and what more runs would settle."""
    names, cases = found.names, found.cases
    after, before = (fit.median_error(cases, p) for p in (found.efficiency, found.before))
    out = statistics.median(map(abs, found.left_out))
    lines = [
        f"{found.runs} runs of {len(cases)} programs on {found.gpu_type}: median error "
        f"{before:.1%} -> {after:.1%}; of a program left out {out:.1%}",
        *["what they teach does not carry over: keep the constants that were"] * (out >= before),
        "",
        f"{'constant':<20} {'was':>8} {'is':>8}   a fifth of it moves a step by up to",
    ]
    for name, share in found.moves.items():
        was, now = getattr(found.before, name), getattr(found.efficiency, name)
        if name in names:
            lines.append(f"{name:<20} {was:>8.4g} {now:>8.4g}   {share:.1%}")
    rest = [name for name, share in found.moves.items() if share > MATTERS and name not in names]
    if rest:
        need = PROGRAMS * (len(names) + 1)
        more = f"; {need} programs settle {rest[0]} too" if len(names) < MOST else ""
        lines.append(f"as they were: {', '.join(rest)}{more}")
    lines += ["", f"{'measured s':>10} {'was':>7} {'is':>7} {'left out':>9}   run"]
    for case, out in zip(cases, found.left_out, strict=True):
        errors = (case.error(p) for p in (found.before, found.efficiency))
        text = "{:>+7.1%} {:>+7.1%}".format(*errors)
        lines.append(f"{case.seconds:10.3f} {text} {out:>+9.1%}   {case.name}")
    return "\n".join(lines)
