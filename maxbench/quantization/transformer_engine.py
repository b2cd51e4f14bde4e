"""Transformer Engine's FP8 kernels, for the formats of tensor.py and mxfp8.py.

TE is imported when first asked for. Its state, recipes and layers stay out: a scale is given from
outside (tensor scaling, current or delayed: whoever calls knows which) or is of blocks (MXFP8).
"""

import functools
import importlib
from importlib import metadata
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from maxbench.config.errors import UserError
from maxbench.quantization import QuantizedArray

BLOCK = 32  # of MXFP8
OLDEST = (2, 17)  # the first whose attention runs inside shard_map; 2.14 knows JAX after 0.9.1
INSTALL = "./install_te.sh builds it; --config.precision.backend=xla needs none"


@functools.cache
def load() -> SimpleNamespace:
    """TE's modules.

    Raises:
      UserError: TE is absent, too old, or does not load here (no driver, another CUDA).
    """
    try:
        version = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        raise UserError(f"Transformer Engine is not installed: {INSTALL}") from None
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserError(f"Transformer Engine {version} is older than {oldest}: {INSTALL}")
    jax.devices()  # JAX brings the NCCL that TE's library is linked to
    module = lambda name: importlib.import_module(f"transformer_engine.jax.{name}")
    try:
        return SimpleNamespace(
            tex=module("cpp_extensions"), gemm=module("cpp_extensions.gemm"), q=module("quantize")
        )
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"Transformer Engine {version} does not load ({error}): {INSTALL}"
        ) from error


def quantize(x, dtype, scale) -> tuple[jax.Array, jax.Array]:
    """x [..., right], bf16, as x / scale, saturated to dtype; and the largest magnitude of x.

    `scale` is of the tensor: fp32, no dims.
    """
    q, te = load().q, load().tex
    how = {"scaling_mode": q.ScalingMode.DELAYED_TENSOR_SCALING, "scale": (1 / scale).reshape(1)}
    quantizer = q.QuantizerFactory.create(q_dtype=dtype, q_layout=q.QuantizeLayout.ROWWISE, **how)
    made = te.quantize(x.reshape(-1, x.shape[-1]), quantizer, flatten_axis=1)
    # TE's kernel and its plain form both leave the largest magnitude at the history's end.
    return made.data.reshape(x.shape), quantizer.amax_history[-1]


def blocks(x, dtype) -> tuple[QuantizedArray, QuantizedArray]:
    """x [..., left, right], bf16, in blocks along right, and along left: one kernel makes both.

    Both dims divide by 32.
    """
    q, (*lead, left, right) = load().q, x.shape
    layout, mode = q.QuantizeLayout.ROWWISE_COLWISE, q.ScalingMode.MXFP8_1D_SCALING
    quantizer = q.QuantizerFactory.create(q_dtype=dtype, q_layout=layout, scaling_mode=mode)
    made = load().tex.quantize(x.reshape(-1, right), quantizer, flatten_axis=1)

    def part(t, *dims):
        bits = jax.lax.bitcast_convert_type(t.scale_inv, jnp.uint8)
        return QuantizedArray(t.data.reshape(x.shape), bits.reshape(*lead, *dims))

    row = part(made.rowwise_tensor, left, right // BLOCK)
    return row, part(made.colwise_tensor, left // BLOCK, right)


def gemm(
    a: QuantizedArray, b: QuantizedArray, over: str, dtype=jnp.bfloat16, exact=False, blocks=False
):
    """'nt' or 'tn' of [..., left, right] matrices, as mxfp8.gemm; `blocks`: scales are of those.

    What a product sums over divides by 16, in MXFP8 by 32, which has no form for a CPU.

    `exact` adds up in fp32 on Hopper too, for gradients. Experts are products of their own: their
    sizes are static, and TE's grouped product for tensor scaling reads sizes back to the host.
    """
    if a.q.ndim > 2:
        part = lambda x, i: QuantizedArray(x.q[i], x.scale[i] if blocks else x.scale)
        each = [(part(a, i), part(b, i)) for i in range(len(a.q))]
        return jnp.stack([gemm(a, b, over, dtype, exact, blocks) for a, b in each])
    te = load()
    if over == "tn" and not blocks:  # Hopper sums over the last dim of both alone
        a, b, over = QuantizedArray(a.q.T, a.scale), QuantizedArray(b.q.T, b.scale), "nt"
    mode = te.q.ScalingMode
    mode = mode.MXFP8_1D_SCALING if blocks else mode.DELAYED_TENSOR_SCALING
    scale = lambda x: jax.lax.bitcast_convert_type(x, jnp.float8_e8m0fnu)
    parts = [
        te.q.ScaledTensorFactory.create_1x(
            data=x.q,
            scale_inv=scale(x.scale) if blocks else x.scale.reshape(1),
            scaling_mode=mode,
            dq_dtype=dtype,
            is_colwise=over == "tn",
            flatten_axis=1,
        )
        for x in (a, b)
    ]
    dims = ((0,), (0,)) if over == "tn" else ((1,), (1,))
    # Not tex.gemm: how to add up would be one environment variable for all products.
    call = te.gemm._te_gemm if te.gemm.GemmPrimitive.enabled() else te.gemm._jax_gemm
    return call(*parts, contracting_dims=dims, use_split_accumulator=exact)
