"""Transformer Engine's quantization and GEMM kernels, and every private name of TE.

TE is imported on first use. Its recipes, layers and state are not used: fp8_per_tensor.py computes
the scales, mxfp8.py has none, and both call these kernels in place of XLA's.
"""

import contextlib
import functools
import importlib.util
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxbench.config.errors import UserError
from maxbench.config.resolve import TE_OLDEST
from maxbench.quantization import QuantizedArray

BLOCK = 32  # elements of an MXFP8 block
INSTALL = "./install_te.sh builds it; --config.precision.backend=xla needs none"


class Modules(NamedTuple):
    """Modules of transformer_engine.jax."""

    cpp_extensions: ModuleType
    gemm: ModuleType
    quantize: ModuleType


def is_installed() -> bool:
    """Whether TE's part for JAX is installed, of any version: from PyPI (its library is in the
    package) or built from a clone (a module of its own)."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("transformer-engine-jax"))
    return importlib.util.find_spec("transformer_engine_jax") is not None


@functools.cache
def load() -> Modules:
    """Imports TE.

    Raises:
      UserError: TE is absent, too old, or fails to load (no driver, another CUDA version).
    """
    try:
        version = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        raise UserError(f"Transformer Engine is not installed: {INSTALL}") from None
    if tuple(map(int, version.split(".")[:2])) < TE_OLDEST:
        oldest = ".".join(map(str, TE_OLDEST))
        raise UserError(f"Transformer Engine {version} is older than {oldest}: {INSTALL}")
    jax.devices()  # loads JAX's plugin, and with it the NCCL that TE's library is linked to
    module = lambda name: importlib.import_module(f"transformer_engine.jax.{name}")
    try:
        return Modules(*map(module, ("cpp_extensions", "cpp_extensions.gemm", "quantize")))
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"Transformer Engine {version} does not load ({error}): {INSTALL}"
        ) from error


def answer_for(capability: tuple[int, int], cores: int) -> None:
    """Makes TE compile for a GPU of this compute capability and number of cores, whatever GPU the
    driver reports: its library asks the GPU for workspaces, and cuDNN for its attention.

    Raises:
      UserError: as load().
    """
    gemm = load().gemm
    utils = importlib.import_module("transformer_engine.jax.quantize.device_utils")
    helper = importlib.import_module("transformer_engine.jax.quantize.helper")
    te = importlib.import_module("transformer_engine_jax")
    for module in (te, gemm):
        function = lambda gpu=0: capability[0] * 10 + capability[1]
        setattr(module, "get_device_compute_capability", function)  # noqa: B010
    for name, answer in _answers(te, capability, cores).items():
        setattr(te, name, answer)
    utils.get_device_compute_capability.cache_clear()
    utils.is_fp8_gemm_with_all_layouts_supported.cache_clear()
    setattr(helper, "_is_scaling_mode_supported", None)  # its cache  # noqa: B010


def _answers(te: ModuleType, capability: tuple[int, int], cores: int) -> dict[str, Any]:
    """Functions of TE's library that ask a GPU, by name, without one.

    Workspaces are those of partial sums in fp32: of a norm's weights by core, of a bias by 32 rows,
    and of attention's gradient of the queries. All others are smaller than a MiB.
    """
    fp32 = lambda *shape: (shape, te.DType.kFloat32)
    arbitrary, none = (getattr(te.NVTE_Fused_Attn_Backend, f"NVTE_{name}")
                       for name in ("F16_arbitrary_seqlen", "No_Backend"))  # fmt: skip

    def backend(asked):
        """cuDNN's attention, where it supports the heads (TE: common/fused_attn)."""
        widest = max(asked.head_dim_qk, asked.head_dim_v)
        latent = (asked.head_dim_qk, asked.head_dim_v) == (192, 128)
        if asked.qkv_dtype not in (te.DType.kBFloat16, te.DType.kFloat16):
            return none, "cuDNN's attention in JAX is of 16 bits"
        if widest > (256 if capability[0] == 9 else 128) and not latent:
            return none, f"heads of {widest} elements"
        return arbitrary, ""

    def attention_backward(batch, _batch, queries, _keys, heads, _groups, _heads, size, *_):
        return fp32(batch, queries, heads, size + 1)

    return {
        "get_fused_attn_backend": backend,
        "get_fused_attn_fwd_workspace_sizes": lambda *_: fp32(1),
        "get_fused_attn_bwd_workspace_sizes": attention_backward,
        "get_norm_fwd_workspace_sizes": lambda *_: [fp32(1)],
        "get_norm_bwd_workspace_sizes": lambda rows, size, *_: [fp32(min(rows, 2 * cores), size)],
        "get_dbias_quantize_workspace_sizes": lambda rows, size, *_: [fp32(-(-rows // 32), size)],
        "get_dact_dbias_quantize_workspace_sizes": (
            lambda rows, size, *_: [fp32(-(-rows // 32), size)]
        ),
        "get_topk_workspace_sizes": lambda *_: [fp32(1)],
    }


def quantize_per_tensor(x: jax.Array, dtype: Any, scale: Any) -> tuple[jax.Array, jax.Array]:
    """x / scale, saturated to an FP8 dtype, and the amax of x.

    Args:
      x: [..., right], bf16.
      scale: of the whole tensor, fp32 without dims; current or delayed.
    """
    te = load().quantize
    quantizer = te.QuantizerFactory.create(
        q_dtype=dtype,
        q_layout=te.QuantizeLayout.ROWWISE,
        scaling_mode=te.ScalingMode.DELAYED_TENSOR_SCALING,
        scale=(1 / scale).reshape(1),
    )
    matrix = x.reshape(-1, x.shape[-1])
    scaled = load().cpp_extensions.quantize(matrix, quantizer, flatten_axis=1)
    # Both TE's kernel and its JAX implementation write the amax to the end of the history.
    return scaled.data.reshape(x.shape), quantizer.amax_history[-1]


def quantize_mxfp8(x: jax.Array, dtype: Any) -> tuple[QuantizedArray, QuantizedArray]:
    """x [..., left, right], bf16, in blocks along right and in blocks along left, by one kernel.

    Both dims are multiples of 32.
    """
    te, (*lead, left, right) = load().quantize, x.shape
    quantizer = te.QuantizerFactory.create(
        q_dtype=dtype,
        q_layout=te.QuantizeLayout.ROWWISE_COLWISE,
        scaling_mode=te.ScalingMode.MXFP8_1D_SCALING,
    )
    scaled = load().cpp_extensions.quantize(x.reshape(-1, right), quantizer, flatten_axis=1)

    def operand(tensor, *scale_dims):
        bits = jax.lax.bitcast_convert_type(tensor.scale_inv, jnp.uint8)
        return QuantizedArray(tensor.data.reshape(x.shape), bits.reshape(*lead, *scale_dims))

    rowwise = operand(scaled.rowwise_tensor, left, right // BLOCK)
    return rowwise, operand(scaled.colwise_tensor, left // BLOCK, right)


def gemm(
    a: QuantizedArray,
    b: QuantizedArray,
    over: Any,
    dtype: Any = jnp.bfloat16,
    exact: bool = False,
    blocks: bool = False,
) -> jax.Array:
    """GEMM of matrices [..., left, right] with equal leading dims, as block_scaled.gemm.

    Experts (leading dims) are separate GEMMs: their sizes are static, and TE's grouped GEMM for
    per-tensor scaling copies the sizes to the host.

    Args:
      over: 'nt' is a b^T, 'tn' is a^T b. The contracted dim is a multiple of 16; of 32 in MXFP8,
        whose GEMM has no CPU implementation.
      exact: accumulates in fp32 on Hopper too (use_split_accumulator), as recipes do for gradients.
      blocks: scales are MXFP8's, not per-tensor.
    """
    if a.q.ndim > 2:
        part = lambda x, i: QuantizedArray(x.q[i], x.scale[i] if blocks else x.scale)
        pairs = [(part(a, i), part(b, i)) for i in range(len(a.q))]
        return jnp.stack([gemm(a, b, over, dtype, exact, blocks) for a, b in pairs])
    te = load()
    if over == "tn" and not blocks:  # Hopper's FP8 GEMMs contract the last dim of both only
        a, b, over = QuantizedArray(a.q.T, a.scale), QuantizedArray(b.q.T, b.scale), "nt"
    mode = te.quantize.ScalingMode
    mode = mode.MXFP8_1D_SCALING if blocks else mode.DELAYED_TENSOR_SCALING
    e8m0 = lambda scale: jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)
    operands = [
        te.quantize.ScaledTensorFactory.create_1x(
            data=x.q,
            scale_inv=e8m0(x.scale) if blocks else x.scale.reshape(1),
            scaling_mode=mode,
            dq_dtype=dtype,
            is_colwise=over == "tn",
            flatten_axis=1,
        )
        for x in (a, b)
    ]
    dims = ((0,), (0,)) if over == "tn" else ((1,), (1,))
    # Private, because tex.gemm takes use_split_accumulator from one environment variable for all.
    call = te.gemm._te_gemm if te.gemm.GemmPrimitive.enabled() else te.gemm._jax_gemm
    return call(*operands, contracting_dims=dims, use_split_accumulator=exact)
