#!/bin/bash
#SBATCH --job-name=maxbench-setup
#SBATCH --nodes=1
#SBATCH --time=01:00:00
#
# Makes what a run needs under STAGE_PATH; can be run again, and goes on where it stopped.
#
#   ./setup.sh --cpu                 a laptop: Python environment, then a tiny run on the CPU
#   STAGE_PATH=/lustre/me/maxbench ./setup.sh             a cluster
#   sbatch -A acct -p batch -N 1 setup.sh                 the same, on a node with GPUs
#
# With enroot it imports a container image to $STAGE_PATH/maxbench.sqsh (RUN_CONF_IMAGE for
# launch.sh); without it, or with SETUP=venv, it makes a Python environment in $STAGE_PATH/venv.
# Variables: STAGE_PATH (or LLMB_INSTALL), CUDA=12|13, SETUP=auto|enroot|venv, IMAGE, TE=true|false.
set -eu -o pipefail

say() { echo "setup: $*"; }
fail() {
  echo "setup: error: $*" >&2
  exit 2
}

CPU=false
for option in "$@"; do
  case "$option" in
    --cpu) CPU=true ;;
    --help | -h)
      sed -n '6,16s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    *) fail "unknown option '$option'; there are --cpu and --help" ;;
  esac
done

find_root() {
  local place
  for place in "${MAXBENCH_ROOT:-}" "$(dirname "${BASH_SOURCE[0]}")" "${SLURM_SUBMIT_DIR:-}"; do
    if [[ -f "$place/maxbench/train.py" ]]; then
      (cd "$place" && pwd)
      return
    fi
  done
  fail "cannot find maxbench; set MAXBENCH_ROOT to where it was cloned"
}

ROOT=$(find_root)
STAGE=${STAGE_PATH:-${LLMB_INSTALL:-$ROOT}}
CUDA=${CUDA:-13}
SETUP=${SETUP:-auto}
IMAGE=${IMAGE:-docker://ghcr.io#nvidia/jax:jax}
TE=${TE:-true}
[[ "$CUDA" =~ ^(12|13)$ ]] || fail "CUDA='$CUDA' is not one of 12, 13"
[[ "$SETUP" =~ ^(auto|enroot|venv)$ ]] || fail "SETUP='$SETUP' is not one of auto, enroot, venv"
[[ "$TE" =~ ^(true|false)$ ]] || fail "TE='$TE' is not one of true, false"
mkdir -p "$STAGE" || fail "STAGE_PATH='$STAGE' cannot be made; choose a folder you may write to"
[[ "$CPU" == true ]] && SETUP=venv TE=false

if [[ "$SETUP" == auto ]]; then
  SETUP=venv
  command -v enroot >/dev/null && SETUP=enroot
fi
if [[ "$SETUP" == enroot ]] && ! command -v enroot >/dev/null; then
  fail "enroot is not on PATH; SETUP=venv makes a Python environment instead"
fi
say "STAGE_PATH=$STAGE SETUP=$SETUP CUDA=$CUDA"

# A Python of 3.11 or later, with a venv around it; uv brings its own where it is installed.
make_venv() {
  local venv=$1 python
  [[ -x "$venv/bin/python" ]] && return
  if command -v uv >/dev/null; then
    uv venv --quiet --seed --python 3.12 "$venv"
    return
  fi
  for python in python3.13 python3.12 python3.11 python3; do
    if command -v "$python" >/dev/null &&
      "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      "$python" -m venv "$venv" && return
      fail "$python cannot make a venv: install its venv package (python3-venv), or uv"
    fi
  done
  fail "no Python 3.11 or later; install one, or uv (https://docs.astral.sh/uv)"
}

install() {
  local venv=$1
  shift
  if command -v uv >/dev/null; then
    uv pip install --quiet --python "$venv/bin/python" "$@"
  else
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
  fi
}

# A step that is done leaves a file that says so, and is not done again.
once() {
  local name=$1
  shift
  if [[ -f "$STAGE/.setup/$name" ]]; then
    say "$name: done before"
    return
  fi
  say "$name ..."
  "$@"
  mkdir -p "$STAGE/.setup"
  touch "$STAGE/.setup/$name"
}

import_image() {
  local file=$STAGE/maxbench.sqsh
  [[ -f "$file" ]] && return
  if [[ -z "${SLURM_JOB_ID:-}" ]] && command -v srun >/dev/null; then
    local where=()
    [[ -n "${SBATCH_ACCOUNT:-}" ]] && where+=(-A "$SBATCH_ACCOUNT")
    [[ -n "${SBATCH_PARTITION:-}" ]] && where+=(-p "$SBATCH_PARTITION")
    srun -N 1 -t 01:00:00 ${where[@]+"${where[@]}"} enroot import --output "$file.part" "$IMAGE"
  else
    enroot import --output "$file.part" "$IMAGE"
  fi
  mv "$file.part" "$file"
}

# launch.sh and report need a Python on the login node, even where runs use a container.
make_venv "$STAGE/venv"
VENV=$STAGE/venv
if [[ "$SETUP" == enroot ]]; then
  once launcher install "$VENV" "absl-py>=2.1" "ml-collections>=1.1" "jinja2>=3.1,<4"
  once image import_image
  say "done. For launch.sh: export STAGE_PATH=$STAGE RUN_CONF_IMAGE=$STAGE/maxbench.sqsh"
  exit 0
fi

if [[ "$CPU" == true ]]; then
  once packages-cpu install "$VENV" -e "$ROOT"
else
  once "packages-cuda$CUDA" install "$VENV" -e "$ROOT" "jax[cuda$CUDA]>=0.10.2"
  [[ "$TE" == true ]] && once transformer-engine "$ROOT/install_te.sh" "$VENV/bin/python"
fi

cd "$ROOT"
devices=()
[[ "$CPU" == true ]] && devices=(--cpu_devices 1)
say "a tiny run ..."
"$VENV/bin/python" -m maxbench.train --config configs/llama31_8b.py:tiny \
  ${devices[@]+"${devices[@]}"} --output_dir "$STAGE"
say "done. For launch.sh: export STAGE_PATH=$STAGE"
