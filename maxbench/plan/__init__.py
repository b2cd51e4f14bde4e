"""A run that is not here: does it fit, how fast is it, what would be faster; drawn, fitted."""

from maxbench.spec.notebook import make_callable


def _plan(config: str, **given):
    """maxbench.plan.answer.plan: what `maxbench plan` does, as an object."""
    from maxbench.plan import answer  # late: numpy takes a tenth of a second

    return answer.plan(config, **given)


make_callable(__name__, _plan)
