#!/usr/bin/env bash
# Installs Transformer Engine into a Python that has jax[cuda12] or jax[cuda13].
#
#   ./install_te.sh [PYTHON]        default: python3
#
# Its core is published as a wheel, its JAX part as source, which pip alone builds against the wrong
# CUDA version. It is built once (3 minutes on 2 cores); the wheel is kept in
# ${XDG_CACHE_HOME:-~/.cache}/maxbench/wheels.
set -eu -o pipefail

VERSION=2.20.2 # of all packages
PYTHON=${1:-python3}
SITE=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
pip() { "$PYTHON" -m pip --quiet --disable-pip-version-check "$@"; }

# The versions that the wheel is built against; they name its folder.
BUILT=$("$PYTHON" - <<'END'
import platform
import sys
from importlib import metadata

for cuda in (13, 12):
    try:
        jax = metadata.version(f"jax-cuda{cuda}-plugin")
    except metadata.PackageNotFoundError:
        continue
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    print(f"jax{jax}-cu{cuda}-{python}-{platform.machine()}")
    break
else:
    sys.exit("install_te: error: this Python has neither jax[cuda12] nor jax[cuda13]; pip install 'jax[cuda13]'")
END
)
[[ "$BUILT" =~ -cu(12|13)- ]]
CUDA=${BASH_REMATCH[1]}
WHEELS=${XDG_CACHE_HOME:-$HOME/.cache}/maxbench/wheels/te$VERSION-$BUILT

suffix=
if [[ "$CUDA" == 12 ]]; then
  suffix=-cu12
  # Without a CUDA toolkit, TE loads libcudart from this path.
  ln -sfn cuda_runtime "$SITE/nvidia/cudart"
fi
pip install "transformer-engine-cu$CUDA==$VERSION" "transformer-engine==$VERSION" \
  nvidia-cudnn-frontend "nvidia-nvtx$suffix" "nvidia-curand$suffix"
if ! compgen -G "$WHEELS/*.whl" >/dev/null; then
  command -v g++ >/dev/null || { echo "install_te: error: no g++ on PATH" >&2 && exit 2; }
  echo "install_te: building for $BUILT ..."
  pip install pybind11 ninja packaging setuptools wheel
  for include in "$SITE"/nvidia/*/include; do
    export CPLUS_INCLUDE_PATH="$include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}"
  done
  mkdir -p "$WHEELS"
  build=$(mktemp -d "$WHEELS/build.XXXX")
  # pip's cache is keyed by the version of the source alone: its wheel may be for another CUDA.
  pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir "$build" \
    "transformer-engine-jax==$VERSION"
  mv "$build"/*.whl "$WHEELS" # atomic: another job may be installing at the same time
  rmdir "$build"
fi
pip install "$WHEELS"/*.whl
