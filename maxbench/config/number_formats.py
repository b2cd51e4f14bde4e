"""Number formats of GEMMs as data: requirements on a run, sizes, and the peak that applies.

The arithmetic of a format is its module in maxbench/quantization. A new format is an entry
of FORMATS and a module.
"""

import dataclasses

from maxbench.config.errors import UserError
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A number format of the GEMMs of layers. All else is computed in `compute`."""

    name: str  # of precision.scaling, if dtype has several formats
    dtype: str  # of precision.dtype
    compute: str  # dtype of activations and of unquantized weights
    peak: str  # bf16 | fp8 | fp4: the GPU's peak for MFU and for the time of GEMMs
    reads: tuple[str, ...]  # operand types of its GEMMs, as in HLO
    bytes: float  # per element that is saved for the backward pass of a GEMM
    arithmetic: str = "unquantized"  # module in maxbench/quantization
    multiple: int = 1  # all dims of its GEMMs are multiples of this
    blocks: bool = False  # elements along a dim share a scale: fsdp and tp must not cut a block
    capability: tuple[int, int] = (0, 0)  # lowest compute capability that has its GEMMs
    amax_history: bool = False  # needs the amax of the last precision.history steps as state
    # Elements that its quantization reads and writes per layer, counted in compiled programs:
    # in units of rows x embed, and of rows x mlp.
    conversions: tuple[int, int] = (0, 0)
    backends: tuple[str, ...] = ("xla", "te")  # of precision.backend

    @property
    def slot_multiple(self) -> int:
        """Slots of an expert that a GPU fills with force_balance are a multiple of this: whole
        blocks, or 16 bytes."""
        return max(8, self.multiple)

    @property
    def quantized(self) -> bool:
        """Whether GEMMs read other numbers than the activations around them."""
        return self.dtype != self.compute


_BF16 = Format(name="bf16", dtype="bf16", compute="bf16", peak="bf16", reads=("bf16",), bytes=2)
_FP32 = Format(name="fp32", dtype="fp32", compute="fp32", peak="bf16", reads=("f32",), bytes=4)
_CURRENT = Format(
    name="current", dtype="fp8", compute="bf16", peak="fp8", reads=("f8e4m3fn", "f8e5m2"), bytes=1,
    arithmetic="fp8_per_tensor", multiple=16, conversions=(10, 6), capability=(8, 9),
)  # fmt: skip
_DELAYED = dataclasses.replace(_CURRENT, name="delayed", amax_history=True)
_MXFP8 = dataclasses.replace(
    _CURRENT, name="mxfp8", reads=("f8e4m3fn",), arithmetic="mxfp8", multiple=32, blocks=True,
    capability=(10, 0),
)  # fmt: skip
# Blocks have 16 elements; 32 are the 16 bytes that a GEMM's rows are aligned to.
_NVFP4 = Format(
    name="nvfp4", dtype="nvfp4", compute="bf16", peak="fp4", reads=("f4e2m1fn",), bytes=0.5625,
    arithmetic="nvfp4", multiple=32, blocks=True, capability=(10, 0), conversions=(38, 18),
    backends=("xla",),
)  # fmt: skip
# The default scaling of a dtype is the first format that the GPU supports.
FORMATS = {f.name: f for f in (_BF16, _FP32, _MXFP8, _CURRENT, _DELAYED, _NVFP4)}
DTYPES = tuple(dict.fromkeys(f.dtype for f in FORMATS.values()))
PEAKS = {f.dtype: f.peak for f in FORMATS.values()}  # by precision.dtype
SCALINGS = tuple(f.name for f in FORMATS.values() if f.name != f.dtype)


def resolve_format(
    dtype: str, scaling: str | None, gpu_type: str, gpu_types: GpuTypes = GPU_TYPES
) -> Format:
    """The format for precision.dtype and precision.scaling; without one it depends on the GPU.

    Raises:
      UserError: the GPU has no GEMMs of that format.
    """
    of_dtype = [f for f in FORMATS.values() if f.dtype == dtype]
    candidates = [f for f in of_dtype if f.name == scaling] or of_dtype
    supports = lambda gpu, f: gpu_types[gpu].chip.capability >= f.capability
    supported = next((f for f in candidates if supports(gpu_type, f)), None)
    if supported is None:
        wanted = candidates[0]
        having = ", ".join(g for g in gpu_types if any(supports(g, f) for f in candidates))
        scalings = " or ".join(f.name for f in of_dtype if supports(gpu_type, f))
        dtypes = dict.fromkeys(f.dtype for f in FORMATS.values() if supports(gpu_type, f))
        chosen = f"precision.scaling={wanted.name!r}" if scalings else f"dtype={dtype!r}"
        others = f"precision.scaling={scalings}" if scalings else f"dtype={' or '.join(dtypes)}"
        raise UserError(
            f"{chosen} and gpu_type={gpu_type!r}: only {having} have GEMMs of that format; "
            f"use {others}"
        )
    return supported
