"""Products of numbers as they are, bf16 or fp32; a weight is an array."""

import itertools

import jax

from maxbench.mesh.places import gather_master
from maxbench.spec.run import Run


class Plain:
    turned, by_outs, matrices = False, False, False

    def scales(self, ws, lead, past):
        return itertools.repeat(None), None

    def weight(self, w, place, lead, scale):
        return gather_master(place, w)

    def operand(self, x, scales, gradient, axes):
        return x, x, None

    def move(self, x, move):
        return move(x)

    def product(self, a, b, over, dtype, exact=False):
        return jax.lax.dot_general(a, b, over, None, dtype)


PLAIN = Plain()


def arithmetic(run: Run) -> Plain:
    return PLAIN
