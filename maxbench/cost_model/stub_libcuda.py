"""Transformer Engine without a GPU driver, for compiling programs that call its kernels."""

import ctypes
import pathlib
import shutil
import subprocess
import tempfile

from maxbench.config.errors import UserError
from maxbench.hardware.gpus import Chip
from maxbench.host import environment
from maxbench.quantization import transformer_engine

NAME = "libcuda.so.1"
# Functions that TE's library links to. In the stub each returns CUDA_ERROR_NO_DEVICE.
FUNCTIONS = """
cuCtxGetCurrent cuFuncSetAttribute cuGetErrorName cuGetErrorString cuInit cuLaunchKernel
cuLaunchKernelEx cuModuleGetFunction cuModuleLoadData cuModuleLoadDataEx cuModuleUnload
cuTensorMapEncodeIm2col cuTensorMapEncodeTiled
"""


def install(chip: Chip) -> None:
    """Loads TE and makes it compile for this GPU, instead of the one that the driver reports.

    Raises:
      UserError: TE is not installed, or does not load.
    """
    try:
        ctypes.CDLL(NAME)
    except OSError:  # no driver; the dynamic linker resolves TE's by the stub's soname
        ctypes.CDLL(str(build_stub(environment.cache_dir())), ctypes.RTLD_GLOBAL)
    transformer_engine.answer_for(chip.capability, chip.cores)


def build_stub(folder: pathlib.Path) -> pathlib.Path:
    """Builds a stub of the driver's library in `folder`, once; returns its path.

    Raises:
      UserError: no C compiler.
    """
    library = folder / NAME
    if library.exists():
        return library
    if not (compiler := shutil.which("cc") or shutil.which("gcc")):
        raise UserError(
            "precision.backend=te: Transformer Engine needs a GPU driver, or a C compiler (cc) to "
            "build a stub of it, and there is neither; use --config.precision.backend=xla"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as part:
        source, built = pathlib.Path(part, "cuda.c"), pathlib.Path(part, NAME)
        source.write_text("".join(f"int {f}(void) {{ return 100; }}\n" for f in FUNCTIONS.split()))
        command = [
            compiler,
            "-shared",
            "-fPIC",
            f"-Wl,-soname,{NAME}",
            "-o",
            str(built),
            str(source),
        ]
        subprocess.run(command, check=True)
        built.rename(library)
    return library
