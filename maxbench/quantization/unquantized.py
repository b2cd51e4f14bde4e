"""GEMMs without quantization, in bf16 or fp32: a weight is an array."""

import itertools

import jax

from maxbench.config.run import Run
from maxbench.sharding.rules import gather_master


class Plain:
    """The Arithmetic of unquantized formats."""

    fprop_transposed, gather_along_outputs, needs_2d = False, False, False

    def scales(self, ws, lead, past):
        return itertools.repeat(None), None

    def weight(self, w, sharding, lead, scale):
        return gather_master(sharding, w)

    def quantize_operand(self, x, scales, gradient, axes):
        return x, x, None

    def map_arrays(self, operand, move):
        return move(operand)

    def product(self, a, b, over, dtype, exact=False):
        return jax.lax.dot_general(a, b, over, None, dtype)


PLAIN = Plain()


def arithmetic(run: Run) -> Plain:
    return PLAIN
