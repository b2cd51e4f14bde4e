"""Transformer Engine on a machine without a GPU: its kernels are compiled into programs, and none
runs."""

import ctypes
import pathlib
import shutil
import subprocess
import tempfile

from maxbench.config import environment
from maxbench.config.errors import UserError
from maxbench.quantization import transformer_engine

NAME = "libcuda.so.1"
# What TE's library wants of it when it is loaded; of the stand-in each fails when it is called.
FUNCTIONS = """
cuCtxGetCurrent cuFuncSetAttribute cuGetErrorName cuGetErrorString cuInit cuLaunchKernel
cuLaunchKernelEx cuModuleGetFunction cuModuleLoadData cuModuleLoadDataEx cuModuleUnload
cuTensorMapEncodeIm2col cuTensorMapEncodeTiled
"""


def install(capability: tuple[int, int]) -> None:
    """Has TE, which asks the driver, take a GPU of this compute capability for the one here.

    Raises:
      UserError: TE is not installed, or does not load.
    """
    try:
        ctypes.CDLL(NAME)
    except OSError:  # no driver; TE finds by its name what is loaded
        ctypes.CDLL(str(stand_in(environment.cache_dir())), ctypes.RTLD_GLOBAL)
    transformer_engine.set_compute_capability(capability)


def stand_in(folder: pathlib.Path) -> pathlib.Path:
    """A library in place of a driver's, made once.

    Raises:
      UserError: there is no C compiler.
    """
    library = folder / NAME
    if library.exists():
        return library
    if not (compiler := shutil.which("cc") or shutil.which("gcc")):
        raise UserError(
            "precision.backend=te: Transformer Engine loads only where a GPU's driver is, or a C "
            "compiler, cc, that makes a stand-in; --config.precision.backend=xla needs neither"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as part:
        source, made = pathlib.Path(part, "cuda.c"), pathlib.Path(part, NAME)
        source.write_text("".join(f"int {f}(void) {{ return 100; }}\n" for f in FUNCTIONS.split()))
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", made, source]
        subprocess.run(command, check=True)
        made.rename(library)
    return library
