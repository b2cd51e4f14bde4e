#!/bin/bash
#SBATCH --job-name=maxbench
#SBATCH --dependency=singleton
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=01:00:00
#SBATCH --open-mode=append
#
# Checks the variables and submits the jobs. Started by sbatch itself, it runs the job.
#
#   DTYPE=fp8 MODEL_SIZE=8b JOB_TOTAL_GPUS=8 launch/launch.sh            submits
#   MODEL=llama2 sbatch -A acct -p batch -N 8 launch/launch.sh
#   launch/launch.sh --dry_run                    prints the sbatch script and the train command
#   launch/launch.sh --wait -- --layers 8         waits for the end; passes flags to the trainer
#   launch/launch.sh --file jobs.toml             submits the jobs of a file
#   launch/launch.sh --suite suite.toml           the same, with expected results for the report
#   launch/launch.sh --help                       lists every variable
set -eu -o pipefail

if ((BASH_VERSINFO[0] < 4 || (BASH_VERSINFO[0] == 4 && BASH_VERSINFO[1] < 2))); then
  echo "launch.sh: bash $BASH_VERSION is too old; 4.2 or later is needed" >&2
  exit 2
fi

# Under sbatch this file is a copy in Slurm's spool; scontrol knows the original path.
find_root() {
  local file="${BASH_SOURCE[0]}" root
  if [[ -n "${SLURM_JOB_ID:-}" && ! -f "$(dirname "$file")/../maxbench/launch/__main__.py" ]]; then
    file=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\(.*/launch[.]sh\).*|\1|p')
  fi
  for root in "${MAXBENCH_ROOT:-}" "$(dirname "$file")/.." "${SLURM_SUBMIT_DIR:-}" \
    "${STAGE_PATH:-}/maxbench"; do
    if [[ -f "$root/maxbench/launch/__main__.py" ]]; then
      (cd "$root" && pwd)
      return
    fi
  done
  echo "launch.sh: cannot find maxbench; set MAXBENCH_ROOT to its checkout" >&2
  return 2
}

find_python() {
  local stage="${STAGE_PATH:-${LLMB_INSTALL:-}}" python
  for python in "${MAXBENCH_PYTHON:-}" "${stage:+$stage/venv/bin/python}" \
    "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "$ROOT/venv/bin/python" python3 python; do
    if [[ -n "$python" ]] && "$python" -c 'import absl, ml_collections' 2>/dev/null; then
      command -v "$python"
      return
    fi
  done
  echo "launch.sh: no Python with absl-py and ml-collections: run ./setup.sh first," \
    "or set MAXBENCH_PYTHON" >&2
  return 2
}

ROOT=$(find_root)
PYTHON=$(find_python)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" MAXBENCH_PYTHON="$PYTHON"
unset HF_TOKEN # data is synthetic and no tokenizer is used: no job needs the token

if [[ -n "${SLURM_JOB_ID:-}" && ! "${1:-}" =~ ^(--dry[-_]run|--wait|--(file|suite)(=.*)?|--help|-h)$ ]]; then
  script=$("$PYTHON" -m maxbench.launch --inside "$@")
  exec bash -c "$script"
fi
exec "$PYTHON" -m maxbench.launch "$@"
