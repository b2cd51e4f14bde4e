#!/bin/bash
#SBATCH --job-name=maxbench-setup
#SBATCH --nodes=1
#SBATCH --time=01:00:00
#
# Installs what a run needs under STAGE_PATH. Run again, it installs only what is missing.
#
#   ./setup.sh --cpu                              laptop: Python environment, tiny run on the CPU
#   STAGE_PATH=/lustre/me/maxbench ./setup.sh     cluster
#   sbatch -A acct -p batch -N 1 setup.sh         the same, on a node with GPUs
#   STAGE_PATH=... ./setup.sh --cpu               login node of another architecture than the nodes
#
# The Python environment is $STAGE_PATH/venv-x86_64 or venv-aarch64; $STAGE_PATH/venv/bin/maxbench
# and .../python select the one of the current machine. With enroot, a container image is created
# as $STAGE_PATH/maxbench.sqsh too, unless SETUP=venv. With Slurm, `maxbench cluster` writes
# $STAGE_PATH/cluster.toml for launch.sh: account, partition, GPU type and others.
# Variables: STAGE_PATH (or LLMB_INSTALL), CUDA=12|13, SETUP=auto|enroot|venv, IMAGE, TE=auto|true|false:
# auto installs Transformer Engine too, and goes on with XLA's FP8 GEMMs if that fails.
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
      sed -n '6,17s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    *) fail "unknown option '$option'; the options are --cpu and --help" ;;
  esac
done

find_root() {
  local root
  for root in "${MAXBENCH_ROOT:-}" "$(dirname "${BASH_SOURCE[0]}")" "${SLURM_SUBMIT_DIR:-}"; do
    if [[ -f "$root/maxbench/train.py" ]]; then
      (cd "$root" && pwd)
      return
    fi
  done
  fail "cannot find maxbench; set MAXBENCH_ROOT to its checkout"
}

ROOT=$(find_root)
STAGE=${STAGE_PATH:-${LLMB_INSTALL:-$ROOT}}
CUDA=${CUDA:-13}
SETUP=${SETUP:-auto}
# The image is named only here, by a monthly tag; its digest is recorded when the image is created.
# enroot 4 also accepts a digest: ...jax@sha256:...
IMAGE=${IMAGE:-docker://nvcr.io#nvidia/jax:26.06-py3}
TE=${TE:-auto}
[[ "$CUDA" =~ ^(12|13)$ ]] || fail "CUDA='$CUDA' is not one of 12, 13"
[[ "$SETUP" =~ ^(auto|enroot|venv)$ ]] || fail "SETUP='$SETUP' is not one of auto, enroot, venv"
[[ "$TE" =~ ^(auto|true|false)$ ]] || fail "TE='$TE' is not one of auto, true, false"
mkdir -p "$STAGE" || fail "STAGE_PATH='$STAGE' cannot be created; choose a folder that you can write to"
[[ "$CPU" == true ]] && SETUP=venv TE=false

if [[ "$SETUP" == auto ]]; then
  SETUP=venv
  command -v enroot >/dev/null && SETUP=enroot
fi
if [[ "$SETUP" == enroot ]] && ! command -v enroot >/dev/null; then
  fail "enroot is not on PATH; SETUP=venv creates a Python environment instead"
fi
say "STAGE_PATH=$STAGE SETUP=$SETUP CUDA=$CUDA"

# Creates a venv of Python 3.11 or later; uv, if installed, downloads Python 3.12.
make_venv() {
  local python
  "$VENV/bin/python" -c 'import pip' 2>/dev/null && return
  rm -rf "$VENV" # incomplete, or of a Python that no longer exists
  if command -v uv >/dev/null; then
    uv venv --quiet --seed --python 3.12 "$VENV"
    return
  fi
  for python in python3.13 python3.12 python3.11 python3; do
    if command -v "$python" >/dev/null &&
      "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      "$python" -m venv "$VENV" && return
      fail "$python cannot create a venv: install its venv package (python3-venv), or uv"
    fi
  done
  fail "no Python 3.11 or later; install one, or uv (https://docs.astral.sh/uv)"
}

install() {
  if command -v uv >/dev/null; then
    uv pip install --quiet --python "$VENV/bin/python" "$@"
  else
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
  fi
}

# Whether the environment has the requirements of maxbench and further ones; prints what is missing.
has() { "$VENV/bin/python" -I "$ROOT/launch/needs.py" "$ROOT" "$@"; }

# Writes wrappers of commands that run the environment of the current machine's architecture.
make_wrappers() {
  local name
  mkdir -p "$STAGE/venv/bin"
  for name in python maxbench; do
    cat >"$STAGE/venv/bin/.$name" <<'END'
#!/bin/bash
venv=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)-$(uname -m)
if [[ ! -x "$venv/bin/python" ]]; then
  echo "error: $venv does not exist: run setup.sh on a machine of this architecture" >&2
  exit 2
fi
exec "$venv/bin/${0##*/}" "$@"
END
    chmod +x "$STAGE/venv/bin/.$name"
    mv "$STAGE/venv/bin/.$name" "$STAGE/venv/bin/$name" # a job may be calling it
  done
}

VENV=$STAGE/venv-$(uname -m)
[[ ! -f "$STAGE/venv/pyvenv.cfg" ]] ||
  fail "$STAGE/venv is an environment that setup.sh did not create; move it, or set another STAGE_PATH"
make_venv
needs=()
if [[ "$SETUP" == venv && "$CPU" == false ]]; then
  needs=("jax-cuda$CUDA-plugin>=0.10.2,<0.13")
fi
if ! has ${needs[@]+"${needs[@]}"}; then
  say "packages ..."
  install -e "$ROOT" ${needs:+"jax[cuda$CUDA]>=0.10.2,<0.13"}
  has ${needs[@]+"${needs[@]}"} || fail "$VENV lacks the requirement above; remove it and run setup.sh again"
fi
if [[ "$SETUP" == venv && "$TE" != false ]] && ! has transformer-engine-jax; then
  say "Transformer Engine ..."
  if ! "$ROOT/install_te.sh" "$VENV/bin/python"; then
    [[ "$TE" == auto ]] || fail "Transformer Engine cannot be installed; TE=false goes without it"
    say "Transformer Engine cannot be installed: FP8 runs on XLA's GEMMs (TE=true stops here instead)"
  fi
fi
make_wrappers

# Writes cluster.toml for launch.sh; if that fails, setup continues without it.
write_cluster() {
  STAGE_PATH=$STAGE "$STAGE/venv/bin/maxbench" cluster ||
    say "continuing without cluster.toml; later: STAGE_PATH=$STAGE $STAGE/venv/bin/maxbench cluster"
}
in_cluster() { sed -n "s/^$1 = \"\(.*\)\"\$/\1/p" "$STAGE/cluster.toml" 2>/dev/null || true; }

[[ "$CPU" == true ]] || ! command -v scontrol >/dev/null || write_cluster

if [[ "$SETUP" == enroot ]]; then
  node=() image=$STAGE/maxbench.sqsh
  if [[ -z "${SLURM_JOB_ID:-}" ]] && command -v srun >/dev/null; then
    node=(srun -N 1 -t 01:00:00)
    account=${SBATCH_ACCOUNT-$(in_cluster SBATCH_ACCOUNT)}
    partition=${SBATCH_PARTITION-$(in_cluster SBATCH_PARTITION)}
    [[ -n "$account" ]] && node+=(-A "$account")
    [[ -n "$partition" ]] && node+=(-p "$partition")
  fi
  say "image of $IMAGE ..."
  ${node[@]+"${node[@]}"} "$ROOT/launch/image.sh" "$IMAGE" "$image"
  [[ -f "$STAGE/cluster.toml" ]] && RUN_CONF_IMAGE=$image write_cluster
  [[ "$(in_cluster RUN_CONF_IMAGE)" == "$image" ]] && image="" # launch.sh reads it from there
  say "done. For launch.sh: export STAGE_PATH=$STAGE${image:+ RUN_CONF_IMAGE=$image}"
  exit 0
fi

cd "$ROOT"
devices=()
[[ "$CPU" == true ]] && devices=(--cpu_devices 1)
say "a tiny run ..."
"$STAGE/venv/bin/maxbench" train --config configs/llama31_8b.py:tiny \
  ${devices[@]+"${devices[@]}"} --output_dir "$STAGE"
say "done. For launch.sh: export STAGE_PATH=$STAGE"
nodes=$(in_cluster ARCHITECTURE)
if [[ -n "${SLURM_JOB_ID:-}" ]]; then
  say "if the login node is not $(uname -m), run there: ./setup.sh --cpu"
elif [[ -n "$nodes" && ! -x "$STAGE/venv-$nodes/bin/python" ]]; then
  say "the nodes are $nodes: sbatch -N 1 setup.sh installs their environment"
fi
