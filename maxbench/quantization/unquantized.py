"""GEMMs without quantization, in bf16 or fp32: a weight is an array."""

import itertools
from typing import Any

import jax

from maxbench.config.number_formats import FORMATS
from maxbench.config.run import Run
from maxbench.sharding.rules import gather_master


class Plain:
    """The Arithmetic of unquantized formats."""

    fprop_transposed, gather_along_outputs, needs_2d, packing = False, False, False, 1
    fuses_addition = True
    slot_multiple = FORMATS["bf16"].slot_multiple

    def scales(self, ws: Any, lead: int, past: Any) -> Any:
        return itertools.repeat(None), None

    def weight(self, w: Any, sharding: Any, lead: int, scale: Any) -> Any:
        return gather_master(sharding, w)

    def quantize_operand(self, x: jax.Array, scales: Any, gradient: bool, axes: Any) -> Any:
        return x, x, None

    def map_arrays(self, operand: Any, move: Any) -> Any:
        return move(operand)

    def product(self, a: Any, b: Any, over: Any, dtype: Any, exact: bool = False) -> jax.Array:
        return jax.lax.dot_general(a, b, over, None, dtype)


PLAIN = Plain()


def arithmetic(run: Run) -> Plain:
    return PLAIN
