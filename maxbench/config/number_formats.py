"""Number formats of GEMMs as facts: what they ask of a run, keep, and are held against.

How a format computes is its module in maxbench/formats. A new one is an entry here, and a module.
"""

import dataclasses

from maxbench.config.errors import UserError
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A number format of the GEMMs of layers. Everything else is computed in `compute`."""

    name: str  # of precision.scaling, where dtype has more than one
    dtype: str  # of precision.dtype
    compute: str  # of activations and of the weights that layers see
    peak: str  # the GPU's peak that its products are held against, and reach a part of
    reads: tuple[str, ...]  # operands of its GEMMs, as XLA's programs call them
    bytes: float  # of a number that is kept for a GEMM's backward pass
    arithmetic: str = "unquantized"  # its module in maxbench/formats
    multiple: int = 1  # which all dims of its GEMMs are whole multiples of
    blocks: bool = False  # numbers along a dim share a scale: fsdp and tp may cut none
    capability: tuple[int, int] = (0, 0)  # of the GPUs that have its GEMMs, at least
    amax_history: bool = False  # its state: largest magnitudes of precision.history steps
    # Numbers that its conversions move per layer, in units of rows x embed and of rows x mlp, as
    # counted in compiled programs.
    conversions: tuple[int, int] = (0, 0)

    @property
    def quantized(self) -> bool:
        """Whether its GEMMs read other numbers than what stands around them."""
        return self.dtype != self.compute


_FP8 = {"dtype": "fp8", "compute": "bf16", "peak": "fp8", "bytes": 1, "conversions": (10, 6)}
_TENSOR = _FP8 | {"reads": ("f8e4m3fn", "f8e5m2"), "arithmetic": "fp8_per_tensor", "multiple": 16}
_BLOCKS = _FP8 | {"reads": ("f8e4m3fn",), "multiple": 32, "blocks": True, "capability": (10, 0)}
# Of those that share a dtype, the first that the GPU has is the default.
FORMATS = {
    f.name: f
    for f in (
        Format(name="bf16", dtype="bf16", compute="bf16", peak="bf16", reads=("bf16",), bytes=2),
        Format(name="fp32", dtype="fp32", compute="fp32", peak="bf16", reads=("f32",), bytes=4),
        Format(name="mxfp8", arithmetic="mxfp8", **_BLOCKS),
        Format(name="current", **_TENSOR),
        Format(name="delayed", amax_history=True, **_TENSOR),
    )
}
DTYPES = tuple(dict.fromkeys(f.dtype for f in FORMATS.values()))
PEAKS = {f.dtype: f.peak for f in FORMATS.values()}  # of a run's dtype
SCALINGS = tuple(f.name for f in FORMATS.values() if f.quantized)


def resolve_format(
    dtype: str, scaling: str, gpu_type: str, gpu_types: GpuTypes = GPU_TYPES
) -> Format:
    """The format that precision.dtype and .scaling ask for; where that is open, the GPU decides.

    Raises:
      UserError: the GPU has no such GEMMs.
    """
    alike = [f for f in FORMATS.values() if f.dtype == dtype]
    asked = [f for f in alike if f.name == scaling] or alike
    has = lambda gpu, f: gpu_types[gpu].chip.capability >= f.capability
    found = next((f for f in asked if has(gpu_type, f)), None)
    if found is None:
        others = " or ".join(f.name for f in alike if has(gpu_type, f))
        raise UserError(
            f"precision.scaling={asked[0].name!r} and gpu_type={gpu_type!r}: only "
            f"{', '.join(gpu for gpu in gpu_types if has(gpu, asked[0]))} multiply such numbers; use "
            + (f"precision.scaling={others}" if others else "another dtype")
        )
    return found
