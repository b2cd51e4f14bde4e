#!/bin/bash
# Starts one process of a run: bound to its NUMA node, and under Nsight Systems if requested.
set -eu -o pipefail

# Number of NUMA nodes with CPUs: on GB200, GPU memory is listed as nodes too.
numa_nodes() {
  local node count=0
  for node in /sys/devices/system/node/node[0-9]*; do
    [[ -s "$node/cpulist" && -n "$(tr -d '[:space:]' <"$node/cpulist")" ]] && count=$((count + 1))
  done
  echo "$count"
}

prefix=()
tasks=${MB_TASKS_PER_NODE:-1} local_id=${MB_LOCAL_PROCESS:-${SLURM_LOCALID:-0}}
if [[ "${MB_BIND:-}" == numa ]] && ((tasks > 1)) && command -v numactl >/dev/null; then
  count=$(numa_nodes)
  if ((count > 1)); then
    node=$((local_id * count / tasks))
    prefix+=(numactl "--cpunodebind=$node" "--membind=$node")
  fi
fi

# Logs power, temperature and clocks of this node's GPUs every 5 s, until the job step ends.
if [[ "$local_id" == 0 && -n "${MB_FOLDER:-}" && "${MB_PROFILE:-}" == "" ]] &&
  command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=timestamp,index,power.draw,temperature.gpu,clocks.sm \
    --format=csv,noheader,nounits -l 5 \
    >"$MB_FOLDER/gpu-${MB_NODE_NAME:-${SLURMD_NODENAME:-$(uname -n)}}.csv" 2>/dev/null </dev/null &
fi

rank=${MB_PROCESS:-${SLURM_PROCID:-0}}
if [[ "${MB_PROFILE:-}" == nsys && ",$MB_PROFILE_RANKS," == *",$rank,"* ]]; then
  if ! command -v nsys >/dev/null; then
    echo "task.sh: error: nsys is not on PATH of $(uname -n): install Nsight Systems there, use a" \
      "container that has it (RUN_CONF_IMAGE), or PROFILER=xplane, which needs neither" >&2
    exit 2
  fi
  mkdir -p "$MB_FOLDER/nsys_profile"
  # shellcheck disable=SC2206  # words from `maxbench launch`, to be split
  options=($MB_NSYS_OPTIONS)
  if [[ "$MB_GPU_METRICS" == true && "$local_id" == 0 ]]; then
    options+=(--gpu-metrics-device=all)
  fi
  prefix+=(nsys profile
    "--output=$MB_FOLDER/nsys_profile/${MB_NSYS_NAME}_${MB_JOB:-${SLURM_JOB_ID:-0}}_node${MB_NODE_INDEX:-${SLURM_NODEID:-0}}_rank$rank"
    "${options[@]}")
fi
exec ${prefix[@]+"${prefix[@]}"} "$@"
