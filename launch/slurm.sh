# shellcheck shell=bash
# The body of a job: preflight, then the run, then what became of it. `maxbench launch` puts the
# header above it: MB_* variables and the commands TRAIN and PREFLIGHT.
set -eu -o pipefail
unset HF_TOKEN APP_SECRET
# The original recipes ask for SLURM_GPUS_PER_NODE=null where there is no gres; srun refuses it.
[[ "${SLURM_GPUS_PER_NODE:-}" =~ ^(null|none)?$ ]] && unset SLURM_GPUS_PER_NODE

say() { echo "[$(date '+%F %T')] $*"; }

# Each start of the job, the first or after a requeue, has a folder of its own.
EXPERIMENT="$MB_OUT/experiments/$MB_NAME"
STARTS="$EXPERIMENT/.job_$SLURM_JOB_ID"
mkdir -p "$EXPERIMENT"
STAMP=${MB_STAMP:-0}
if ((${SLURM_RESTART_COUNT:-0} > 0 || STAMP == 0)); then
  STAMP=$(date +%s)
  until mkdir "$EXPERIMENT/${MB_NAME}_$STAMP" 2>/dev/null; do STAMP=$((STAMP + 1)); done
fi
FOLDER="$EXPERIMENT/${MB_NAME}_$STAMP"
mkdir -p "$FOLDER"
TRAIN+=("--config.output.stamp=$STAMP")

# A requeued job goes on from the newest checkpoint of its earlier starts that is whole.
RESUME=""
if [[ -f "$STARTS" ]]; then
  while read -r earlier; do
    for done_ in "$EXPERIMENT/${MB_NAME}_$earlier"/checkpoints/*/about/run.json; do
      [[ -f "$done_" ]] && RESUME+="${RESUME:+,}$EXPERIMENT/${MB_NAME}_$earlier" && break
    done
  done <"$STARTS"
fi
echo "$STAMP" >>"$STARTS"
[[ -n "$RESUME" ]] && TRAIN+=("--resume" "$RESUME")

# The coordinator: the first node, at the address by which Slurm itself reaches it.
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ADDRESS=$(scontrol show node "$FIRST" --oneliner | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
export JAX_COORDINATOR_ADDRESS="${ADDRESS:-$FIRST}:$((61440 + (SLURM_JOB_ID + STAMP) % 4096))"
export MB_FOLDER="$FOLDER"

SRUN=(srun "--nodes=$MB_NODES" "--ntasks-per-node=$MB_TASKS_PER_NODE" "--mpi=$MB_MPI"
  "--cpus-per-task=$((SLURM_CPUS_ON_NODE / MB_TASKS_PER_NODE > 0 ? SLURM_CPUS_ON_NODE / MB_TASKS_PER_NODE : 1))"
  --cpu-bind=none --kill-on-bad-exit=1 --label)
if [[ -n "$MB_IMAGE" ]]; then
  SRUN+=("--container-image=$MB_IMAGE" "--container-mounts=$MB_MOUNTS" --container-writable
    --no-container-mount-home "--container-workdir=$MB_ROOT")
fi
cd "$MB_ROOT"

say "maxbench: JOB_ID=$SLURM_JOB_ID RESTART=${SLURM_RESTART_COUNT:-0} NODES=$SLURM_JOB_NODELIST" \
  "COORDINATOR=$JAX_COORDINATOR_ADDRESS FOLDER=$FOLDER RESUME=${RESUME:-none}"
say "train: ${TRAIN[*]}"
echo "{\"job\": \"$SLURM_JOB_ID\", \"restart\": ${SLURM_RESTART_COUNT:-0}," \
  "\"nodes\": \"$SLURM_JOB_NODELIST\", \"label\": \"$MB_LABEL\", \"started\": $(date +%s)}" \
  >"$FOLDER/job.json"

# What a killed job leaves behind for the report: why, where Slurm said it.
finish() {
  local code=$1 phase=$2 why
  why=$(grep -ahoE 'CANCELLED AT [^*]*|DUE TO [A-Z ]+|NODE FAILURE[^*]*|oom.kill[^*]*|error: .*' \
    "$FOLDER"/srun-"$phase"-*.log 2>/dev/null | tail -n 3 | tr '\n' ';' | tr -d '"\134[:cntrl:]' || true)
  echo "{\"code\": $code, \"phase\": \"$phase\", \"reason\": \"$why\", \"ended\": $(date +%s)}" \
    >"$FOLDER/exit.json"
  if ((code != 0)); then
    say "$phase ended with exit code $code; the end of its output:"
    tail -qn 15 "$FOLDER"/srun-"$phase"-*.log || true
  fi
  say "done: exit code $code; results: $FOLDER"
  # Stopped before its time limit, or by a process that died: it goes on, as long as each start
  # saves something. What may not be requeued has said so to sbatch.
  if ((code != 0)) && compgen -G "$FOLDER/checkpoints/[0-9]*/about/run.json" >/dev/null &&
    scontrol show job "$SLURM_JOB_ID" | grep -q 'Requeue=1'; then
    say "requeued: it goes on from its newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID" || say "it could not be requeued, see above"
  fi
  exit "$code"
}

LOG="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.log"
if ((${#PREFLIGHT[@]})); then
  say "preflight"
  code=0
  MB_FOLDER="" MB_LOG="$FOLDER/srun-preflight-$LOG" "${SRUN[@]}" "--output=$FOLDER/srun-preflight-$LOG" \
    "$MB_ROOT/launch/task.sh" "${PREFLIGHT[@]}" "--json=$FOLDER/preflight.json" || code=$?
  sed -n '/\[Gloo\]/d; s/^ *0: //p' "$FOLDER/srun-preflight-$LOG" || true
  ((code == 0)) || finish "$code" preflight
fi

if [[ "$MB_VBOOST" == true ]]; then
  srun "--nodes=$MB_NODES" --ntasks-per-node=1 sudo -n nvidia-smi boost-slider --vboost 1 ||
    say "ENABLE_VBOOST: not every node raised its slider, see above; the run goes on without"
fi

say "training"
code=0
MB_LOG="$FOLDER/srun-train-$LOG" "${SRUN[@]}" "--output=$FOLDER/srun-train-$LOG" \
  "$MB_ROOT/launch/task.sh" "${TRAIN[@]}" || code=$?
finish "$code" train
