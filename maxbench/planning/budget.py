"""A plan over a token budget: days, failures, checkpoints, cost and energy.

Failures come at random, one in mtbf_hours_per_gpu hours of a GPU. Each costs the work since the
last checkpoint and a restart; each checkpoint costs the seconds that the step waits for it. The
time that is expected is J. T. Daly's (A higher order estimate of the optimum checkpoint interval,
2006), and so is the best interval.
"""

import dataclasses
import math
from collections.abc import Mapping

from maxbench.config.errors import UserError
from maxbench.config.validation import field, validate
from maxbench.planning.planner import Plan

# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv:2407.21783, 3.3.4).
MTBF_HOURS = 54 * 24 * 16_384 / 419
CHECKPOINT_S, RESTART_S = 10.0, 600.0  # assumed: what the step waits, and from failure to step
LEAST = 1e-3  # goodput of a run that gets somewhere
# Per GPU, of the whole server at its most: datasheets of DGX H100, DGX H200 and DGX B200.
WATTS = {"h100": 10_200 / 8, "h200": 10_200 / 8, "b200": 14_300 / 8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """What a budget is made of; 0 = not asked for, or unknown.

    Attributes:
      tokens: to train on.
      gpu_watts: of a GPU and its share of the server, without cooling.
      checkpoint_s: that a step waits for a checkpoint.
      restart_s: from a failure to the first step after it.
    """

    tokens: float = field(above=0)
    usd_per_gpu_hour: float = field(0.0, at_least=0)
    gpu_watts: float = field(0.0, at_least=0)
    mtbf_hours_per_gpu: float = field(MTBF_HOURS, above=0)
    checkpoint_s: float = field(CHECKPOINT_S, above=0)
    restart_s: float = field(RESTART_S, at_least=0)

    def __post_init__(self):
        validate(self)


FLAGS = tuple(f.name for f in dataclasses.fields(BudgetOptions))


def budget_options(given: Mapping[str, str]) -> BudgetOptions | None:
    """What flags ask for; None where they ask for nothing.

    Raises:
      UserError: a number that cannot be, or one that means nothing without tokens.
    """
    if given and "tokens" not in given:
        raise UserError(
            f"{', '.join(given)} says something of a budget alone: give --tokens 15e12 too"
        )
    return BudgetOptions(**given) if given else None


def budget(p: Plan, asked: BudgetOptions) -> dict:
    """The budget as plain data; without what was not asked for.

    Raises:
      UserError: so many GPUs fail before they get anywhere.
    """
    run = p.run
    gpus = run.layout.gpus
    steps = math.ceil(asked.tokens / (run.layout.gbs * run.train.seq))
    mtbf = asked.mtbf_hours_per_gpu * 3600 / gpus
    every = run.output.checkpoint_every
    every = every or max(1, round(best_interval(asked.checkpoint_s, mtbf) / p.step_s))
    good = goodput(every * p.step_s, asked.checkpoint_s, asked.restart_s, mtbf)
    if good < LEAST:
        raise UserError(
            f"mtbf_hours_per_gpu={asked.mtbf_hours_per_gpu:g}: {gpus} GPUs fail every "
            f"{mtbf:.3g} s, before a restart of {asked.restart_s:g} s and a checkpoint get anywhere"
        )
    seconds = steps * p.step_s / good
    hours = gpus * seconds / 3600
    watts = asked.gpu_watts or WATTS.get(run.layout.gpu_type, 0)
    found = {
        "tokens": asked.tokens,
        "steps": steps,
        "days_without_failures": steps * p.step_s / 86400,
        "days": seconds / 86400,
        "goodput": good,
        "failures": seconds / mtbf,
        "hours_between_failures": mtbf / 3600,
        "checkpoint_every_steps": every,
        "checkpoint_every_s": every * p.step_s,
        "gpu_hours": hours,
    }
    if asked.usd_per_gpu_hour:
        found |= {"usd": hours * asked.usd_per_gpu_hour}
    if watts:
        found |= {"mwh": hours * watts / 1e6, "gpu_watts": watts}
    return found


def best_interval(checkpoint_s: float, mtbf_s: float) -> float:
    """Daly's seconds of work between two checkpoints."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    x = math.sqrt(checkpoint_s / (2 * mtbf_s))
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + x / 3 + x * x / 9) - checkpoint_s


def goodput(work_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of the time that is work which counts, with a checkpoint after so much of it."""
    in_mtbf = lambda seconds: min(300.0, seconds / mtbf_s)  # e^600 is still a number
    segment = math.exp(in_mtbf(restart_s)) * math.expm1(in_mtbf(work_s + checkpoint_s))
    return work_s / (mtbf_s * segment)


def words(found: dict) -> list[str]:
    """The budget in two lines or three."""
    tokens = f"{found['tokens'] / 1e12:g}T" if found["tokens"] >= 1e12 else f"{found['tokens']:.3g}"
    often = found["checkpoint_every_s"] / 60
    lines = [
        f"{tokens} tokens: {found['days']:,.1f} days, {found['days_without_failures']:,.1f} if "
        f"nothing failed; {found['failures']:,.0f} failures, one in "
        f"{found['hours_between_failures']:,.1f} h",
        f"goodput {found['goodput']:.1%} with a checkpoint every {often:,.1f} min "
        f"({found['checkpoint_every_steps']} steps)",
    ]
    parts = [f"{found['gpu_hours']:,.0f} GPU hours"]
    if "usd" in found:
        parts.append(f"${found['usd']:,.0f}")
    if "mwh" in found:
        parts.append(f"{found['mwh']:,.0f} MWh at {found['gpu_watts']:,.0f} W per GPU")
    return [*lines, ", ".join(parts)]
