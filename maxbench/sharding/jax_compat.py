"""JAX's private names, and whatever differs between the supported versions of jax and XLA.

No other module of the package imports jax._src or compares versions (tests/test_codebase.py).
Importing this module needs no jax: preflight checks compiler options without it.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any


@functools.cache
def jaxlib_version() -> tuple[int, int]:
    """(major, minor) of the installed jaxlib, which contains XLA; (0, 0) if there is none."""
    try:
        major, minor = metadata.version("jaxlib").split(".")[:2]
        return int(major), int(minor)
    except metadata.PackageNotFoundError:
        return 0, 0


def collective_pipelining(**enabled: bool) -> dict[str, object]:
    """XLA options that move collectives across loop iterations; the names changed in jaxlib 0.11.

    Args:
      enabled: by kind of collective, as all_gather=True.
    """
    if jaxlib_version() < (0, 11):
        return {f"xla_gpu_enable_pipelined_{kind}": on for kind, on in enabled.items()}
    mode = lambda on: f"COLLECTIVE_PIPELINING_MODE_{'ON' if on else 'OFF'}"
    return {f"xla_gpu_pipeline_{kind}": mode(on) for kind, on in enabled.items()}


def collective_kernels_off() -> dict[str, object]:
    """XLA options that leave small all-reduces to NCCL instead of XLA's own kernels.

    jaxlib 0.12 cannot compile its kernel for the maximum of 4 x 12 FP8 scales, and aborts.
    """
    if jaxlib_version() < (0, 12):
        return {}
    return {"xla_gpu_experimental_use_collective_kernels": ""}


CAUSAL = {True: "CAUSAL", False: "NO_MASK"}  # names of cuDNN's masks


def cudnn_attention(q: Any, k: Any, v: Any, causal: bool, scale: float, window: int = 0) -> Any:
    """cuDNN's flash attention.

    jax.nn.dot_product_attention is the same kernel by a public name, but its VJP takes no
    logsumexp, which ring attention needs (model/attention.py).

    Args:
      q, k, v: [b, t, h, k], [b, s, g, k], [b, s, g, k of the values].
      scale: of the products of queries and keys.
      window: tokens that a query attends to, itself included; needs causal. 0 is all before it.

    Returns:
      The output [b, t, h, k of the values], and the logsumexp [b, h, t] in fp32.
    """
    primitive = _cudnn()._dot_product_attention_fwd_p_wrapper
    mask = (CAUSAL[causal], scale, window)
    return _bind_attention(primitive, q, k, v, mask, is_training=True)


def cudnn_attention_grad(
    q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, causal: bool, scale: float, window: int = 0
) -> Any:
    """Gradients of q, k and v, from the output o, its gradient do, and the logsumexp."""
    primitive = _cudnn()._dot_product_attention_bwd_p_wrapper
    return _bind_attention(primitive, q, k, v, (CAUSAL[causal], scale, window), lse, o, do)


def cudnn_attention_packed(
    q: Any, k: Any, v: Any, starts: Any, per_sequence: int, scale: float, window: int = 0
) -> Any:
    """cuDNN's flash attention, causal, of each document of a packed batch to itself.

    JAX's function takes positions of tokens, and up to 0.11 scales those of keys by the heads of
    queries (jax pull request 39521): with grouped queries it reads other tokens. Hence the
    primitive below it, which takes the offsets of elements that cuDNN reads.

    Args:
      q, k, v: [b, t, h, k], [b, t, g, k], [b, t, g, k]: cuDNN reads keys and values at the same
        offsets, so that their widths are equal.
      starts: first token of each document among all b x t, ascending, and the token after the
        last one; int32 [b x per_sequence + 1]. A document may be empty.
      per_sequence: at least 2; the documents may be divided among the sequences in any way.

    Returns:
      The output, unwritten outside of the documents, and the logsumexp by the document's token,
      fp32 [documents, h, t], unwritten after its end.
    """
    primitive = _cudnn()._dot_product_attention_fwd_p
    packing = _packing(q, k, v, starts, per_sequence)
    mask = ("PADDING_CAUSAL", scale, window)
    return _bind_attention(primitive, q, k, v, mask, packing=packing, is_training=True)


def cudnn_attention_packed_grad(
    q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, starts: Any, per_sequence: int,
    scale: float, window: int = 0,
) -> Any:  # fmt: skip
    """Gradients of q, k and v, unwritten outside of the documents; lse as it is returned."""
    primitive = _cudnn()._dot_product_attention_bwd_p
    packing = _packing(q, k, v, starts, per_sequence)
    mask = ("PADDING_CAUSAL", scale, window)
    return _bind_attention(primitive, q, k, v, mask, lse, o, do, packing=packing)


def _packing(q: Any, k: Any, v: Any, starts: Any, per_sequence: int) -> tuple:
    """Lengths of queries and keys, and offsets of both: [b, m] and [b, m + 1], filled row by row.
    cuDNN reads b x m + 1 offsets."""
    import jax.numpy as jnp

    assert k.shape == v.shape
    assert per_sequence > 1
    b = len(q)
    lengths = jnp.diff(starts).reshape(b, per_sequence)
    padded = jnp.pad(starts, (0, b - 1), mode="edge").reshape(b, per_sequence + 1)
    offsets = (padded * x.shape[2] * x.shape[3] for x in (q, k))
    return lengths, lengths, *offsets


def cudnn_version() -> tuple[int, int, int]:
    """That of the present device."""
    number = _cudnn().check_cudnn_version()
    return number // 10000, number // 100 % 100, number % 100


def _cudnn():
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def _bind_attention(
    primitive, q, k, v, logits: tuple, *saved, packing: tuple = (), **options
) -> tuple:
    """Binds a primitive without bias and page tables.

    Args:
      logits: the name of a mask, scale, and window.
      packing: lengths and offsets, for a primitive that gets those of cuDNN.
    """
    import jax.numpy as jnp

    cudnn, (mask, scale, window) = _cudnn(), logits
    options |= {
        "mask_type": cudnn.MaskType[mask],
        "layout": cudnn.AttentionLayout.BTNH.value,
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "sliding_window_length": window or None,
    }
    if "score_mod" in inspect.signature(cudnn._dot_product_attention).parameters:  # since jax 0.12
        names = ("score_mod_name", "score_mod_jaxpr") if packing else ("score_mod",)
        options |= dict.fromkeys(names)
    unused = jnp.zeros(0, q.dtype)
    between = unused, *(packing or (unused,) * 4), unused, unused
    return tuple(primitive.bind(q, k, v, *between, *saved, **options))


def _hybrid_mesh(
    mesh_shape: Sequence[int], dcn_mesh_shape: Sequence[int], devices: Sequence[Any], **_: Any
) -> Any:
    """mesh_utils.create_hybrid_device_mesh() of devices in the order of nodes: each axis is split
    between slices first, then inside of them."""
    import numpy as np

    sizes, n = [*dcn_mesh_shape, *mesh_shape], len(mesh_shape)
    pairs = [axis for i in range(n) for axis in (i, n + i)]
    whole = [a * b for a, b in zip(dcn_mesh_shape, mesh_shape, strict=True)]
    return np.array(devices).reshape(sizes).transpose(pairs).reshape(whole)


CUDNN = 91200  # 9.12: newer than any version that JAX's checks ask for


@contextlib.contextmanager
def checks_answered_for(devices: Sequence[Any], capability: tuple[int, int]) -> Iterator[None]:
    """Inside, JAX's checks of a present GPU answer for compile-only devices.

    They are: the version of cuDNN and the compute capability that attention needs, the GPU that
    Pallas compiles for, jax.default_backend(), and create_hybrid_device_mesh(), because
    compile-only GPUs do not say their slice. Arrays are still on CPUs.
    """
    import jax
    from jax._src import xla_bridge
    from jax.experimental import mesh_utils
    from jax.extend import backend as extended

    number = lambda text: tuple(map(int, text.split(".")))
    local = xla_bridge.local_devices

    def local_devices(process_index=None, backend=None, host_id=None):
        if backend in ("gpu", "cuda"):
            return [*devices]
        return local(process_index, backend, host_id)

    answers: list[tuple[Any, str, Any]] = [
        (_cudnn(), "check_cudnn_version", lambda: CUDNN),
        (_cudnn(), "check_compute_capability", lambda text: capability >= number(text)),
        (_cudnn(), "is_cuda_compute_capability_equal", lambda text: capability == number(text)),
        (xla_bridge, "local_devices", local_devices),
        (jax, "local_devices", local_devices),
        (jax, "default_backend", lambda: "gpu"),
        (extended, "get_default_device", lambda: devices[0]),
        (mesh_utils, "create_hybrid_device_mesh", _hybrid_mesh),
    ]
    known = [(module, name) for module, name, _ in answers if hasattr(module, name)]
    before = [(module, name, getattr(module, name)) for module, name in known]
    try:
        for module, name, answer in answers:
            setattr(module, name, answer)
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
