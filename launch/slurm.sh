# shellcheck shell=bash
# Body of a job script: preflight, run, exit status. `maxbench launch` prepends the header: MB_*
# variables and the commands TRAIN and PREFLIGHT.
set -eu -o pipefail
unset HF_TOKEN APP_SECRET
# NVIDIA's recipes set SLURM_GPUS_PER_NODE=null on clusters without gres; srun refuses it.
[[ "${SLURM_GPUS_PER_NODE:-}" =~ ^(null|none)?$ ]] && unset SLURM_GPUS_PER_NODE

say() { echo "[$(date '+%F %T')] $*"; }

# Each start of the job, the first one and each after a requeue, has its own folder.
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

# A requeued job continues from the newest complete checkpoint of its earlier starts.
RESUME=""
if [[ -f "$STARTS" ]]; then
  while read -r earlier; do
    for complete in "$EXPERIMENT/${MB_NAME}_$earlier"/checkpoints/*/about/run.json; do
      [[ -f "$complete" ]] && RESUME+="${RESUME:+,}$EXPERIMENT/${MB_NAME}_$earlier" && break
    done
  done <"$STARTS"
fi
echo "$STAMP" >>"$STARTS"
if [[ -n "$RESUME" ]]; then
  for i in "${!TRAIN[@]}"; do # instead of the checkpoint that the first start loaded
    [[ "${TRAIN[i]}" == --resume ]] && unset "TRAIN[i]" "TRAIN[i + 1]"
  done
  TRAIN+=("--resume" "$RESUME")
fi

# Process 0 is on the first node, at the address that Slurm uses for it; slurm_env.py has its port.
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ADDRESS=$(scontrol show node "$FIRST" --oneliner | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
unset JAX_COORDINATOR_ADDRESS
export MB_COORDINATOR_HOST="${ADDRESS:-$FIRST}"
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
  "COORDINATOR=$MB_COORDINATOR_HOST FOLDER=$FOLDER RESUME=${RESUME:-none}"
say "train: ${TRAIN[*]}"
echo "{\"job\": \"$SLURM_JOB_ID\", \"restart\": ${SLURM_RESTART_COUNT:-0}," \
  "\"nodes\": \"$SLURM_JOB_NODELIST\", \"label\": \"$MB_LABEL\", \"started\": $(date +%s)}" \
  >"$FOLDER/job.json"

# Runs the tasks of a phase; returns the exit code of the one that failed first. That of srun is
# the largest: 143 of the tasks that it ended, whatever the first one had.
run() {
  local phase=$1 log code first
  log="$FOLDER/srun-$phase-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.log"
  shift
  MB_LOG="$log" "${SRUN[@]}" "--output=$log" "$MB_ROOT/launch/task.sh" "$@" 2>&1 |
    tee "$FOLDER/srun-$phase.messages" >&2
  code=${PIPESTATUS[0]}
  first=$(sed -nE 's/^srun: error: .*tasks? .*: Exited with exit code ([0-9]+).*/\1/p
    s/^srun: error: .*tasks? .*: Terminated.*/143/p
    s/^srun: error: .*tasks? .*: Killed.*/137/p' "$FOLDER/srun-$phase.messages" | head -n 1)
  return "$((code ? ${first:-$code} : 0))"
}

# Whether the job starts again, as maxbench/config/exit_codes.py describes.
restarts() {
  local code=$1 stopped_by=$2 saved=$3
  ((code != 0 && code != 2)) || return 1
  [[ "$saved" == true || "$stopped_by" == SIGTERM ]] && return 0
  [[ -z "$stopped_by" ]] && ((code == 75 || code == 143))
}

# "time limit" if SIGTERM came for it: 120 s before, and Slurm may be a minute early.
stopped_by() {
  local end
  end=$(sed -n 's/.* EndTime=\([^ ]*\).*/\1/p' <<<"$JOB")
  end=$(date -d "$end" +%s 2>/dev/null) || return 0
  ((end - $(date +%s) > 200)) || echo "time limit"
}

# Writes exit.json for the report, with the reason from the messages of Slurm.
finish() {
  local code=$1 phase=$2 why
  why=$(grep -ahoE 'CANCELLED AT [^*]*|DUE TO [A-Z ]+|NODE FAILURE[^*]*|oom.kill[^*]*|error: .*' \
    "$FOLDER"/srun-"$phase"-*.log 2>/dev/null | tail -n 3 | tr '\n' ';' | tr -d '"\134[:cntrl:]' || true)
  echo "{\"code\": $code, \"phase\": \"$phase\", \"reason\": \"$why\", \"ended\": $(date +%s)}" \
    >"$FOLDER/exit.json"
  if ((code != 0)); then
    say "$phase ended with exit code $code; last lines of its output:"
    tail -qn 15 "$FOLDER"/srun-"$phase"-*.log || true
  fi
  say "done: exit code $code; results: $FOLDER"
  local saved=false
  compgen -G "$FOLDER/checkpoints/[0-9]*/about/run.json" >/dev/null && saved=true
  JOB=$(scontrol show job "$SLURM_JOB_ID" --oneliner)
  if restarts "$code" "$(stopped_by)" "$saved"; then
    if [[ "$JOB" != *Requeue=1* ]]; then
      say "no requeue: the job was submitted with --no-requeue"
    elif ((${SLURM_RESTART_COUNT:-0} >= MB_MAX_RESTARTS)); then
      say "no requeue: MAX_RESTARTS=$MB_MAX_RESTARTS"
    else
      say "requeue: the job continues from its newest checkpoint, if it has one"
      scontrol requeue "$SLURM_JOB_ID" || say "the job could not be requeued, see above"
    fi
  fi
  exit "$code"
}

if ((${#PREFLIGHT[@]})); then
  say "preflight"
  code=0
  MB_FOLDER="" run preflight "${PREFLIGHT[@]}" "--json=$FOLDER/preflight.json" || code=$?
  sed -n '/\[Gloo\]/d; s/^ *0: //p' "$FOLDER"/srun-preflight-*.log || true
  ((code == 0)) || finish "$code" preflight
fi

if [[ "$MB_VBOOST" == true ]]; then
  srun "--nodes=$MB_NODES" --ntasks-per-node=1 sudo -n nvidia-smi boost-slider --vboost 1 ||
    say "ENABLE_VBOOST: not every node raised its slider, see above; the run continues"
fi

say "training"
code=0
run train "${TRAIN[@]}" || code=$?
finish "$code" train
