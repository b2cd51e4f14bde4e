"""Transformer Engine's FP8: quantize and gemm, as mxfp8 has them, on TE's own kernels.

TE is imported when first asked for. Its state, recipes and layers stay out: a scale is given from
outside (tensor scaling, current or delayed: whoever calls knows which) or is of blocks (MXFP8).
"""

import functools
import importlib
from importlib import metadata
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from maxbench.mxfp8 import BLOCK, Form, Quantized, operands

OLDEST = (2, 17)  # the first whose attention runs inside shard_map; 2.14 knows JAX after 0.9.1
INSTALL = "./install_te.sh builds it; --config.precision.backend=xla needs none"

ACTS = {"swiglu": ("silu", "linear"), "geglu": ("gelu", "linear"), "relu2": ("squared_relu",)}


@functools.cache
def load() -> SimpleNamespace:
    """TE's modules.

    Raises:
      ValueError: TE is absent, too old, or does not load here (no driver, another CUDA).
    """
    try:
        version = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        raise ValueError(f"Transformer Engine is not installed: {INSTALL}") from None
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ValueError(f"Transformer Engine {version} is older than {oldest}: {INSTALL}")
    jax.devices()  # JAX brings the NCCL that TE's library is linked to
    module = lambda name: importlib.import_module(f"transformer_engine.jax.{name}")
    try:
        return SimpleNamespace(
            tex=module("cpp_extensions"), gemm=module("cpp_extensions.gemm"), q=module("quantize")
        )
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(
            f"Transformer Engine {version} does not load ({error}): {INSTALL}"
        ) from error


def quantize(x, dtype, forms=("row", "col"), scale=None) -> Quantized:
    """x [..., left, right], bf16, in the forms asked for.

    Args:
      scale: of the tensor, fp32 without dims: data is x / scale, saturated to dtype. None is
        MXFP8, blocks of 32; the column form's data is then [..., left, right].
      forms: products over right read 'row', those over left 'col'. With a scale 'col' is a
        transpose of 'row': ask for it where it is used more than once, gemm makes its own.
    """
    quantizer = _quantizer(dtype, forms, scale)
    made = load().tex.quantize(x.reshape(-1, x.shape[-1]), quantizer, flatten_axis=1)
    return _forms(made, x.shape, quantizer, forms, scale)


def activate(x, act: str, dtype, forms=("row", "col"), scale=None) -> Quantized:
    """quantize(activation of x [..., left, gates, right]) in one pass: act is a name of ACTS."""
    quantizer, (*batch, gates, right) = _quantizer(dtype, forms, scale), x.shape
    made = load().tex.act_lu(x.reshape(-1, gates, right), ACTS[act], quantizer)
    return _forms(made, (*batch, right), quantizer, forms, scale)


def _quantizer(dtype, forms, scale):
    q = load().q
    if scale is None:
        # TE has no kernel for the column form alone: one makes both.
        layout = "ROWWISE_COLWISE" if "col" in forms else "ROWWISE"
        how = {"scaling_mode": q.ScalingMode.MXFP8_1D_SCALING}
    else:
        layout = "ROWWISE"
        how = {"scaling_mode": q.ScalingMode.DELAYED_TENSOR_SCALING}
        how["scale"] = (1 / scale).reshape(1)
    return q.QuantizerFactory.create(q_dtype=dtype, q_layout=q.QuantizeLayout[layout], **how)


def _forms(made, shape, quantizer, forms, scale) -> Quantized:
    if scale is not None:
        row = Form(made.data.reshape(shape), scale)
        col = Form(jnp.swapaxes(row.data, -1, -2), scale) if "col" in forms else None
        # TE's kernel and its plain form both leave the largest magnitude at the history's end.
        return Quantized(row, col, quantizer.amax_history[-1])
    *lead, left, right = shape
    part = lambda t, *dims: Form(t.data.reshape(shape), t.scale_inv.reshape(*lead, *dims))
    if "col" not in forms:
        return Quantized(part(made, left, right // BLOCK), None)
    row = part(made.rowwise_tensor, left, right // BLOCK)
    return Quantized(row, part(made.colwise_tensor, left // BLOCK, right))


def gemm(a: Quantized, b: Quantized, product: str, dtype=jnp.bfloat16, exact: bool = False):
    """'nn', 'nt' or 'tn' of [..., left, right] matrices, as mxfp8.gemm.

    What a product sums over divides by 16, in MXFP8 by 32, which has no form for a CPU.

    `exact` adds up in fp32 on Hopper too, for gradients. Experts are products of their own: their
    sizes are static, and TE's grouped product for tensor scaling reads sizes back to the host.
    """
    batch = (a.row or a.col).data.ndim - 2
    if batch:
        part = lambda q, i: jax.tree.map(lambda x: x[i] if x.ndim > 1 else x, q)
        experts = range((a.row or a.col).data.shape[0])
        return jnp.stack([gemm(part(a, i), part(b, i), product, dtype, exact) for i in experts])
    return _matrix(a, b, product, dtype, exact)


def _matrix(a: Quantized, b: Quantized, product: str, dtype, exact: bool):
    te = load()
    blocks = (a.row or a.col).scale.ndim > 0
    if not blocks:  # Hopper sums over the last dim of both alone
        turn = lambda q: q._replace(col=q.col or Form(q.row.data.T, q.row.scale))
        a, b = turn(a), turn(b)
    mode = te.q.ScalingMode
    mode = mode.MXFP8_1D_SCALING if blocks else mode.DELAYED_TENSOR_SCALING
    columns = (product[0] == "t", product[1] == "n")
    parts = [
        te.q.ScaledTensorFactory.create_1x(
            data=form.data,
            scale_inv=form.scale if blocks else form.scale.reshape(1),
            scaling_mode=mode,
            dq_dtype=dtype,
            is_colwise=blocks and column,
            flatten_axis=1,
        )
        for form, column in zip(operands(a, b, product), columns, strict=True)
    ]
    dims = tuple((0,) if blocks and column else (1,) for column in columns)
    # Not tex.gemm: how to add up would be one environment variable for all products.
    call = te.gemm._te_gemm if te.gemm.GemmPrimitive.enabled() else te.gemm._jax_gemm
    return call(*parts, contracting_dims=dims, use_split_accumulator=exact)
