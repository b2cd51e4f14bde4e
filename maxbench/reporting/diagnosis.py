"""Why runs are slower than published: sentences from the data of the runs.

Nothing is guessed: if the data does not show a reason, the sentence says so.
"""

import collections
from collections.abc import Mapping, Sequence

from maxbench.reporting.compare import Curve, RunSummary
from maxbench.run_logs.record import dig

LARGE = 0.05  # least share of a predicted step that is worth naming
# Part of a predicted step in which nothing is computed (planner.figures()["parts_s"]) -> its group.
LOST = {
    "exposed": "communication",
    "contention": "communication",
    "slowest": "communication",
    "idle": "pipeline idle",
    "launch": "host",
    "host": "host",
}
# Least share of the speed per GPU that is lost between two scales, beyond what published runs lose.
SCALE = 0.02
BEYOND = 0.03  # least share by which a measured step is longer than predicted


def summary(rows: Sequence[RunSummary]) -> str:
    """The number of runs that are as fast as published, or why none can be compared."""
    judged = [x for x in rows if x.ok and x.share]
    if not judged:
        why = collections.Counter(x.why.removeprefix("not comparable: ") for x in rows if x.ok)
        reason = f": {why.most_common(1)[0][0]}" if why else ": none finished"
        return f"No run can be compared with a published figure{reason}"
    good = sum(x.verdict == "PASS" for x in judged)
    runs = "1 run is" if len(judged) == 1 else f"{len(judged)} runs are"
    return f"{good} of {runs} as fast as published"


def exemplar(rows: Sequence[RunSummary]) -> str:
    """Whether each workload reaches the share of its baseline that an Exemplar Cloud reaches."""
    judged = [x for x in rows if x.ok and x.share]
    if not judged:
        return "no workload can be compared"
    below = [f"{x.record.name} ({x.share:.1%})" for x in below_published(rows)]
    if below:
        return f"not reached: {len(below)} of {len(judged)} runs are below: {', '.join(below)}"
    return f"reached by all of {len(judged)} runs; {len(rows) - len(judged)} are not compared"


def below_published(rows: Sequence[RunSummary]) -> list[RunSummary]:
    """Runs that are slower than published, the slowest first."""
    slow = [x for x in rows if x.ok and x.share and x.verdict != "PASS"]
    return sorted(slow, key=lambda x: x.share or 0)


def reasons(run: RunSummary, rows: Sequence[RunSummary], curves: Sequence[Curve]) -> list[str]:
    """Why a run is slower than published, as far as its data shows, the strongest reason first."""
    if not (run.baseline and run.step):
        return []
    published_s, step_s = run.baseline.step_s, run.step["mean"]
    few_steps = _few_steps(published_s / run.step["median"], run.limits.passes)
    from_steps = [_slow_hosts(run), few_steps, *_unusual_steps(run), _repeat(run, rows)]
    predicted = _prediction(run, step_s, published_s) if run.planned else []
    return [*filter(None, [*_profile(run), *from_steps, _scale(run, curves), *predicted])]


def _profile(run: RunSummary) -> list[str]:
    return [f"its {note}" for note in run.notes if note.startswith("profile: ")]


def _slow_hosts(run: RunSummary) -> str:
    slow = [str(host) for host in dig(run.record.result, "slow_hosts", [])]
    return f"it has slow hosts ({', '.join(slow)})" if slow else ""


def _few_steps(share: float, passes: float) -> str:
    if share < passes:
        return ""
    return f"a few of its steps are slow: with its median step it would be at {share:.0%}"


def _unusual_steps(run: RunSummary) -> list[str]:
    return [f"its {note}" for note in run.notes if note.startswith("step time")]


def _repeat(run: RunSummary, rows: Sequence[RunSummary]) -> str:
    best = max(
        (x.share for x in rows if x.ok and x.share and x.repeat_key == run.repeat_key), default=0
    )
    return f"another run of it reached {best:.0%}" if best >= run.limits.passes else ""


def _scale(run: RunSummary, curves: Sequence[Curve]) -> str:
    for curve in curves:
        for point, before in zip(curve.points[1:], curve.points, strict=False):
            lost = before.efficiency - point.efficiency
            if point.published is None or before.published is None:
                continue
            published_loss = before.published - point.published
            same = (point.gpus, point.tokens_s) == (run.record.gpus, run.tokens_s)
            if same and lost - published_loss > SCALE:
                return (
                    f"its speed per GPU falls by {lost:.0%} from {before.gpus} to {point.gpus} GPUs"
                    f", that of the published runs by {max(0.0, published_loss):.0%}"
                )
    return ""


def _prediction(run: RunSummary, measured_s: float, published_s: float) -> list[str]:
    """Reasons from the prediction of the step, which is not a measurement."""
    planned = run.planned or {}
    step_s, parts_s = planned["step_s"], planned["parts_s"]
    predicted_share, excess = published_s / step_s, measured_s / step_s - 1
    if predicted_share < run.limits.passes:
        reason = f"plan predicts no more than {predicted_share:.0%} for this layout"
    elif excess > BEYOND:
        reason = f"its step takes {excess:.0%} longer than plan predicts"
    else:
        return []
    shares = {name: s / step_s for name, s in split(parts_s).items() if name != "computing"}
    large = [f"plan attributes {x:.0%} of the step to {n}" for n, x in shares.items() if x > LARGE]
    return [reason, *large]


def split(parts_s: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a predicted step by group: computing, communication, pipeline idle and host."""
    groups: dict[str, float] = {"computing": 0.0}
    for name, seconds in parts_s.items():
        group = LOST.get(name, "computing")
        groups[group] = groups.get(group, 0.0) + seconds
    return groups
