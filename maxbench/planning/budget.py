"""Training of a token budget: days, failures, checkpoints, cost and energy.

A GPU fails once in mtbf_hours_per_gpu hours; metrics/checkpoint_interval.py has what that costs.
"""

import math
from collections.abc import Mapping

from maxbench.config.errors import UserError
from maxbench.config.options import TokenBudget
from maxbench.metrics import checkpoint_interval
from maxbench.planning.planner import Plan

MIN_GOODPUT = 1e-3  # below, the run makes no progress in practice
# Maximum power of the server per GPU: datasheets of DGX H100, DGX H200 and DGX B200.
WATTS = {"h100": 10_200 / 8, "h200": 10_200 / 8, "b200": 14_300 / 8}


def budget(p: Plan, options: TokenBudget) -> dict:
    """The budget as plain data, without cost and energy where they are unknown.

    Raises:
      UserError: failures are too frequent for progress.
    """
    run = p.run
    gpus = run.layout.gpus
    assert options.tokens
    steps = math.ceil(options.tokens / (run.layout.gbs * run.train.seq))
    mtbf = options.mtbf_hours_per_gpu * 3600 / gpus
    every = run.output.checkpoint_every
    best_s = checkpoint_interval.best_interval_s(options.checkpoint_s, mtbf)
    every = every or max(1, round(best_s / p.step_s))
    work_s = every * p.step_s
    share = checkpoint_interval.goodput(work_s, options.checkpoint_s, options.restart_s, mtbf)
    if share < MIN_GOODPUT:
        raise UserError(
            f"mtbf_hours_per_gpu={options.mtbf_hours_per_gpu:g}: {gpus} GPUs fail every "
            f"{mtbf:.3g} s, too often for progress with a restart of {options.restart_s:g} s"
        )
    seconds = steps * p.step_s / share
    hours = gpus * seconds / 3600
    watts = options.gpu_watts or WATTS.get(run.layout.gpu_type, 0)
    result = {
        "tokens": options.tokens,
        "steps": steps,
        "days_without_failures": steps * p.step_s / 86400,
        "days": seconds / 86400,
        "goodput": share,
        "failures": seconds / mtbf,
        "hours_between_failures": mtbf / 3600,
        "checkpoint_every_steps": every,
        "checkpoint_every_s": work_s,
        "gpu_hours": hours,
    }
    if options.usd_per_gpu_hour:
        result |= {"usd": hours * options.usd_per_gpu_hour}
    if watts:
        result |= {"mwh": hours * watts / 1e6, "gpu_watts": watts}
    return result


def budget_lines(found: Mapping[str, float]) -> list[str]:
    """The budget in three lines."""
    tokens = f"{found['tokens'] / 1e12:g}T" if found["tokens"] >= 1e12 else f"{found['tokens']:.3g}"
    minutes = found["checkpoint_every_s"] / 60
    lines = [
        f"{tokens} tokens: {found['days']:,.1f} days, {found['days_without_failures']:,.1f} "
        f"without failures; {found['failures']:,.0f} failures, one in "
        f"{found['hours_between_failures']:,.1f} h",
        f"goodput {found['goodput']:.1%} with a checkpoint every {minutes:,.1f} min "
        f"({found['checkpoint_every_steps']} steps)",
    ]
    parts = [f"{found['gpu_hours']:,.0f} GPU hours"]
    if "usd" in found:
        parts.append(f"${found['usd']:,.0f}")
    if "mwh" in found:
        parts.append(f"{found['mwh']:,.0f} MWh at {found['gpu_watts']:,.0f} W per GPU")
    return [*lines, ", ".join(parts)]
