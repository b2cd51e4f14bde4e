"""A run that is not here: does it fit, how fast is it, what would be faster; drawn, fitted."""

from maxbench.spec.notebook import make_callable

make_callable(__name__, "maxbench.plan.answer.plan")
