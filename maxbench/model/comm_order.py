"""Order of one GEMM's collectives over tp, or of experts' over ep: which GEMMs they overlap.
linear() follows it.

Without an order, XLA's scheduler delays wgrads to the end of the backward pass, where no collective
is left to overlap them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxbench.quantization import QuantizedArray
from maxbench.sharding import ordering


class CommOrder(NamedTuple):
    """Ordering tokens (sharding/ordering.py) that enter and leave one GEMM.

    Of experts without tp, they order all-to-alls over ep in the same way.

    The forward pass takes tokens as arguments and returns them as results. The backward pass is a
    derivative: it can only take tokens as the gradients of results, and return them as the
    gradients of arguments. So each field has a token for either pass:

      field        forward pass                         backward pass
      wait_for[0]  taken: the result of the collective  returned: token of the dgrad
                   over tp is used after it
      wait_for[1]                                       returned: token of the all-gather over tp;
                                                        without one, of the dgrad
      wait_for[2]                                       returned: token of the wgrad
      issued       taken, and returned plus a token of  taken: dy's all-gather over tp is used after
                   the gathered x, or of the product    it; returned: token of the wgrad
                   where the result is reduce-scattered

    The backward pass all-gathers dy if the forward pass reduce-scatters, and x again if the forward
    pass all-gathers. A caller passes `issued` from one reduce-scattering GEMM to the next, so that
    the backward pass overlaps the all-gather of each dy with the wgrad of the GEMM after it.

    Attributes:
      wait_for: fp32 [3], or None.
      issued: fp32 scalar, or None.
      dx_unordered: as in MatmulSpec.
    """

    wait_for: jax.Array | None = None
    issued: jax.Array | None = None
    dx_unordered: bool = False

    @property
    def used_after(self) -> jax.Array | None:
        """The token after which the result of the forward pass's collective is used."""
        return None if self.wait_for is None else self.wait_for[0]

    def issue(self, x: Any) -> jax.Array | None:
        """`issued`, plus the token of an array."""
        return None if self.issued is None else self.issued + ordering.token(x)


UNORDERED = CommOrder()


class BackwardTokens:
    """Tokens of the backward pass of one GEMM, and what waits for them.

    Args:
      wait_for, issued: whether CommOrder has these fields.
      dy_used_after: gradient of the returned `issued`.
    """

    def __init__(self, wait_for: bool, issued: bool, dy_used_after: Any):
        self.wait_for, self.issued = wait_for, issued
        self.dy_used_after = dy_used_after if issued else None
        self.x: jax.Array | None = None  # of x, all-gathered again
        self.gathered: jax.Array | None = None  # of the last all-gather
        self.dgrad: Any = None
        self.wgrad: Any = None

    def x_is_gathered(self, x: Any) -> None:
        self.x = self.gathered = ordering.token(x)

    def dy_is_gathered(self, dy: Any) -> None:
        self.gathered = ordering.token(dy)

    def after_x(self, dy: Any) -> Any:
        """dy, used after x is gathered, so that the GEMM before this one overlaps the all-gather of
        x: the reduce-scatter of dx is issued only after the dgrad."""
        return after(dy, self.x)

    def after_wgrad(self, dx: jax.Array) -> jax.Array:
        """dx, used after the wgrad, which its reduce-scatter then overlaps."""
        return ordering.after(dx, None if self.x is None else self.wgrad)

    def gradients(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Gradients of CommOrder.wait_for and issued."""
        gathered = self.dgrad if self.gathered is None else self.gathered
        returned = jnp.stack([self.dgrad, gathered, self.wgrad])
        return returned if self.wait_for else None, self.wgrad if self.issued else None


def after(operand: Any, t: jax.Array | None) -> Any:
    """An operand of a GEMM, used only after the token: of a quantized one its scale is, which is
    small."""
    if isinstance(operand, QuantizedArray):
        return operand._replace(scale=ordering.after(operand.scale, t))
    return ordering.write_after(operand, t)
