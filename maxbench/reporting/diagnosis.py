"""Are the runs as fast as they should be, and if not, why: sentences, from what their data shows.

Nothing is guessed: where the data does not say why, the sentence says so.
"""

import collections
from collections.abc import Mapping, Sequence

from maxbench.reporting import compare
from maxbench.reporting.compare import Curve, RunSummary
from maxbench.run_logs.record import dig

LARGE = 0.05  # of a predicted step that is worth naming
LOST = {  # plan's parts of a step in which nothing is computed
    "exposed communication": "communication",
    "slower beside communication": "communication",
    "waiting for the slowest GPU": "communication",
    "pipeline idle": "pipeline idle",
    "gaps between kernels": "host",
    "the host decides what runs": "host",
}
SCALE = 0.02  # of the speed per GPU, lost between two scales beyond what the published runs lose
BEYOND = 0.03  # of a predicted step by which a measured one is longer


def summary(rows: Sequence[RunSummary]) -> str:
    """How many runs are as fast as published, and how many cannot be said."""
    judged = [x for x in rows if x.ok and x.share]
    if not judged:
        why = collections.Counter(x.why.removeprefix("not comparable: ") for x in rows if x.ok)
        reason = f": {why.most_common(1)[0][0]}" if why else ": none finished"
        return f"No run can be held against a published figure{reason}"
    good = sum(x.verdict == "PASS" for x in judged)
    runs = "1 run is" if len(judged) == 1 else f"{len(judged)} runs are"
    return f"{good} of {runs} as fast as published"


def below_published(rows: Sequence[RunSummary]) -> list[RunSummary]:
    """Runs that are not as fast as published, the furthest behind first."""
    short = [x for x in rows if x.ok and x.share and x.verdict != "PASS"]
    return sorted(short, key=lambda x: x.share)


def reasons(one: RunSummary, rows: Sequence[RunSummary], curves: Sequence[Curve]) -> list[str]:
    """Why a run is behind, as far as its data shows, the most telling reason first."""
    found = [_slow_hosts(one), _few_steps(one), *_odd_steps(one), _repeat(one, rows)]
    return [*filter(None, [*found, _scale(one, curves), *_plan(one)])]


def _slow_hosts(one: RunSummary) -> str:
    slow = [str(host) for host in dig(one.record.result, "slow_hosts", [])]
    return f"it has slow hosts ({', '.join(slow)})" if slow else ""


def _few_steps(one: RunSummary) -> str:
    share = one.baseline.step_s / one.step["median"]
    if share < compare.PASS:
        return ""
    return f"a few of its steps are slow: with its median step it would be at {share:.0%}"


def _odd_steps(one: RunSummary) -> list[str]:
    return [f"its {note}" for note in one.notes if note.startswith("step time")]


def _repeat(one: RunSummary, rows: Sequence[RunSummary]) -> str:
    same = [x.share for x in rows if x.ok and x.share and x.tuning == one.tuning]
    best = max(same, default=0)
    return f"another start of it reached {best:.0%}" if best >= compare.PASS else ""


def _scale(one: RunSummary, curves: Sequence[Curve]) -> str:
    for curve in curves:
        for point, before in zip(curve.points[1:], curve.points, strict=False):
            lost = before.efficiency - point.efficiency
            if point.published is None or before.published is None:
                continue
            theirs = before.published - point.published
            same = (point.gpus, point.tokens_s) == (one.record.gpus, one.tokens_s)
            if same and lost - theirs > SCALE:
                return (
                    f"its speed per GPU falls by {lost:.0%} from {before.gpus} to {point.gpus} GPUs"
                    f", that of the published runs by {max(0.0, theirs):.0%}"
                )
    return ""


def _plan(one: RunSummary) -> list[str]:
    """What plan's prediction of the step says; a prediction is not a measurement."""
    if not one.planned:
        return []
    step_s, parts = one.planned["step_s"], one.planned["parts"]
    best, more = one.baseline.step_s / step_s, one.step["mean"] / step_s - 1
    said = []
    if best < compare.PASS:
        said.append(f"plan expects no more than {best:.0%} of this layout")
    elif more > BEYOND:
        said.append(f"its step takes {more:.0%} longer than plan predicts")
    if said:
        share = {name: s / step_s for name, s in split(parts).items() if name != "computing"}
        said += [f"plan gives {x:.0%} of the step to {n}" for n, x in share.items() if x > LARGE]
    return said


def split(parts: Mapping[str, float]) -> dict[str, float]:
    """Plan's parts of a step in four: computing, communication, pipeline idle and host; seconds."""
    made: dict[str, float] = {"computing": 0.0}
    for name, seconds in parts.items():
        kind = LOST.get(name, "computing")
        made[kind] = made.get(kind, 0.0) + seconds
    return made
