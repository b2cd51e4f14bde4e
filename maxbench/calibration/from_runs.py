"""Constants of a GPU type, fitted to finished runs.

The program of every run is compiled as `maxbench plan` does, and simulated. The constants that
change the steps of these runs most are fitted, and no more of them than the runs determine.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence

from maxbench.calibration import fit
from maxbench.calibration.fit import Observation
from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.cost_model import compile_cache, hlo
from maxbench.evidence.error_band import prediction_interval
from maxbench.hardware.gpus import GPU_TYPES, Efficiency, GpuTypes, PeakFraction
from maxbench.metrics import flops
from maxbench.planning import planner
from maxbench.run_logs import readers
from maxbench.run_logs.record import Given, RunRecord, dig
from maxbench.terminal import console

PROGRAMS = 2  # different programs per fitted constant
MAX_FACTOR = 2.0  # by which a constant may change
STEP = 1.2  # factor by which a constant is changed to see what depends on it
SIGNIFICANT = 0.005  # share of a step that must change with it
MAX_CONSTANTS = 4  # with more, constants absorb errors of the model
LINEARIZATIONS = 2  # of the predictions, each at the constants of the last fit


@dataclasses.dataclass(frozen=True)
class RunFit:
    """Constants of a GPU type, fitted to runs.

    Attributes:
      runs: number of runs.
      before, efficiency: the constants before and after the fit.
      sensitivities: constant -> the largest share of a step that a change by STEP changes, largest
        first.
      names: the constants that were fitted.
      observations: different programs, each with the median of its runs.
      left_out: error of each program with constants fitted to the others.
    """

    gpu_type: str
    runs: int
    before: Efficiency
    efficiency: Efficiency
    sensitivities: dict[str, float]
    names: list[str]
    observations: list[Observation]
    left_out: list[float]

    @property
    def generalizes(self) -> bool:
        """Whether the constants predict a program that they were not fitted to better than those
        before."""
        errors = statistics.median(map(abs, self.left_out))
        return errors < fit.median_error(self.observations, self.before)

    @property
    def band(self) -> tuple[float, float] | tuple[()]:
        """Factors of a predicted step between which nine of ten steps of further programs are; ()
        with one program."""
        if len(self.left_out) < 2:
            return ()
        return prediction_interval([-math.log1p(error) for error in self.left_out])


def fit_runs(paths: Sequence[str], gpu_types: GpuTypes = GPU_TYPES) -> RunFit:
    """Fits the constants that the runs determine.

    Args:
      paths: result.json files, or folders that contain some.
      gpu_types: those that the runs may name.

    Raises:
      UserError: a run that cannot be used, or too few runs.
    """
    runs = [finished_run(record, gpu_types) for record in readers.read(paths, Given(gpu_types))]
    gpu_type = _one_gpu_type(runs)
    programs: dict[str, tuple[Run, list[float]]] = {}
    for run, step_s in runs:
        programs.setdefault(compile_cache.key(run), (run, []))[1].append(step_s)
    if len(programs) < PROGRAMS:
        raise UserError(
            f"calibrate: {len(runs)} run{'s' * (len(runs) > 1)} of {len(programs)} program; "
            f"{PROGRAMS} programs that differ (in layout, batch, sequence, layers or dtype) settle "
            f"one constant, {2 * PROGRAMS} two, and so on"
        )
    observations = [observation(run, statistics.median(s)) for run, s in programs.values()]
    before = gpu_types[gpu_type].efficiency
    constants = (f.name for f in dataclasses.fields(Efficiency))
    sensitivities = {name: sensitivity(name, observations, before) for name in constants}
    sensitivities = dict(sorted(sensitivities.items(), key=lambda item: -item[1]))
    names = [name for name, share in sensitivities.items() if share > SIGNIFICANT]
    names = names[: min(MAX_CONSTANTS, len(observations) // PROGRAMS)]
    efficiency, linear = before, observations
    for _ in range(LINEARIZATIONS):
        linear = [linearize(o, names, efficiency) for o in observations]
        efficiency = _fit(names, linear, before)
    left_out = [
        o.error(_fit(names, linear[:i] + linear[i + 1 :], before)) for i, o in enumerate(linear)
    ]
    return RunFit(
        gpu_type, len(runs), before, efficiency, sensitivities, names, observations, left_out
    )


def _fit(names: Sequence[str], some: Sequence[Observation], before: Efficiency) -> Efficiency:
    return fit.fit(dict.fromkeys(names, some), before, MAX_FACTOR)[0]


def _one_gpu_type(runs: Sequence[tuple[Run, float]]) -> str:
    gpu_types = sorted({run.layout.gpu_type for run, _ in runs})
    if len(gpu_types) > 1:
        raise UserError(
            f"calibrate: the runs are on {', '.join(gpu_types)}; give runs on one GPU type"
        )
    return gpu_types[0]


def finished_run(r: RunRecord, gpu_types: GpuTypes) -> tuple[Run, float]:
    """A finished run, and the median of its steps in seconds.

    Raises:
      UserError: the run did not finish, or `plan` cannot compile it.
    """
    unread = "; ".join(r.unread)
    if unread and not r.result:
        raise UserError(f"calibrate: {str(r.path)!r}: {unread}; leave the run out")
    try:
        run = r.to_run(gpu_types)
    except UserError as e:
        raise UserError(f"calibrate: {str(r.path)!r}: {e}") from None
    step_s = dig(r.result, "step_s.median", 0.0)
    if r.status != "done":
        raise UserError(f"calibrate: {str(r.path)!r} is {r.status!r}; give runs that are 'done'")
    work = run.model, run.train.seq, run.layout.gbs, run.layout.gpus
    least_s = flops.seconds_at_peak(*work, run.gpu.peak_tflops(run.format.peak))
    if not math.isfinite(step_s) or step_s <= 0:
        raise UserError(
            f"calibrate: {str(r.path)!r}: step_s.median={dig(r.result, 'step_s', {}).get('median')}"
            " is no time; leave the run out"
        )
    if step_s < least_s:
        raise UserError(
            f"calibrate: {str(r.path)!r}: step_s.median={step_s:g} s is below {least_s:.3g} s, its "
            f"FLOPs at the peak of {run.layout.gpus} {run.layout.gpu_type}; leave the run out"
        )
    return run, step_s


def observation(run: Run, seconds: float) -> Observation:
    """A run's measured step with its prediction."""
    compiled, _ = planner.compile_program(run)
    program = hlo.parse(compiled.text)
    predict = functools.cache(
        lambda efficiency: planner.simulate_plan(run, program, efficiency=efficiency).seconds
    )
    workload = f"{run.model.name} {run.model.size} {run.precision.dtype}"
    return Observation(f"{workload}, {run.layout.describe()}", seconds, predict)


def sensitivity(name: str, observations: Sequence[Observation], efficiency: Efficiency) -> float:
    """The largest share of a step that changes with a constant changed by STEP."""
    other = fit.with_constant(efficiency, name, getattr(efficiency, name) / STEP)
    return max(abs(math.log(o.predict(other) / o.predict(efficiency))) for o in observations)


def linearize(o: Observation, names: Sequence[str], efficiency: Efficiency) -> Observation:
    """An observation whose prediction is linear in latencies and in inverse rates."""

    def term(name: str, at: Efficiency) -> float:
        value = getattr(at, name)
        return 1 / value if Efficiency.__dataclass_fields__[name].type is PeakFraction else value

    seconds, slopes = o.predict(efficiency), {}
    for name in names:
        other = fit.with_constant(efficiency, name, getattr(efficiency, name) / STEP)
        step = term(name, other) - term(name, efficiency)
        slopes[name] = (o.predict(other) - seconds) / step

    def predict(at: Efficiency) -> float:
        change = (slopes[name] * (term(name, at) - term(name, efficiency)) for name in names)
        return max(seconds + sum(change), 1e-3 * seconds)

    return Observation(o.name, o.seconds, predict)


def table(result: RunFit) -> str:
    """The fitted constants, the errors before and after, and what more runs would determine."""
    names, observations = result.names, result.observations
    after, before = (fit.median_error(observations, p) for p in (result.efficiency, result.before))
    left_out = statistics.median(map(abs, result.left_out))
    limited = [name for name in names if fit.at_limit(name, result.efficiency)]
    lines = [
        f"{result.runs} runs of {len(observations)} programs on {result.gpu_type}: median error "
        f"{before:.1%} -> {after:.1%}; of a program left out {left_out:.1%}",
        *["the fit does not generalize: the constants stay as they were, and nothing is written"]
        * (not result.generalizes),
        *(
            f"{name} is at the limit of its plausible range, {fit.PLAUSIBLE[name][0]:g} to "
            f"{fit.PLAUSIBLE[name][1]:g}: the runs have another cause"
            for name in limited
        ),
        "",
        *console.table(
            ["constant", "before", "after", f"change of a step by {STEP - 1:.0%} of it"],
            [
                [
                    name,
                    *(f"{getattr(p, name):.4g}" for p in (result.before, result.efficiency)),
                    f"{result.sensitivities[name]:.1%}",
                ]
                for name in names
            ],
        ),
    ]
    significant = (name for name, share in result.sensitivities.items() if share > SIGNIFICANT)
    if unfitted := [name for name in significant if name not in names]:
        more = f"; {PROGRAMS * (len(names) + 1)} programs settle {unfitted[0]} too"
        more = more if len(names) < MAX_CONSTANTS else ""
        lines.append(f"unchanged: {', '.join(unfitted)}{more}")
    errors = lambda o, left_out: (o.error(result.before), o.error(result.efficiency), left_out)
    rows = [
        [f"{o.seconds:.3f}", *map(console.change, errors(o, error)), o.name]
        for o, error in zip(observations, result.left_out, strict=True)
    ]  # fmt: skip
    heads = ["measured s", "before", "after", "left out", "run"]
    return "\n".join([*lines, "", *console.table(heads, rows, text=(4,))])
