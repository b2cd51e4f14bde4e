"""A run that is not here: compile its step, read the program, price it, play it, draw, search."""

from maxbench.spec.notebook import make_callable


def _plan(config: str, **given):
    """maxbench.plan.answer.plan: what `maxbench plan` does, as an object."""
    from maxbench.plan import answer  # late: numpy takes a tenth of a second

    return answer.plan(config, **given)


make_callable(__name__, _plan)
