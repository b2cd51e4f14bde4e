"""Optimal interval between checkpoints, and the share of time that is useful work.

Failures are a Poisson process. A failure costs the work since the last checkpoint, and a restart; a
checkpoint costs the seconds for which it blocks the step. Both formulas are from J. T. Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
Computer Systems 22 (2006). Young's (1974), sqrt(2 checkpoint_s mtbf_s), is their first order.
"""

import math


def best_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Optimal seconds of work between two checkpoints."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    x = math.sqrt(checkpoint_s / (2 * mtbf_s))
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + x / 3 + x * x / 9) - checkpoint_s


def goodput(work_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Fraction of time that is work saved by a checkpoint, with one every `work_s` seconds."""
    in_mtbf = lambda seconds: min(300.0, seconds / mtbf_s)  # e^600 is still a number
    segment = math.exp(in_mtbf(restart_s)) * math.expm1(in_mtbf(work_s + checkpoint_s))
    return work_s / (mtbf_s * segment)
