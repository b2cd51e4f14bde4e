#!/bin/bash
# One node of a PyTorch workload on Run:ai: passes the training operator's variables to maxbench.
set -eu -o pipefail
unset HF_TOKEN APP_SECRET
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -n "${MASTER_ADDR:-}" && "${WORLD_SIZE:-1}" -gt 1 ]]; then
  [[ "$MASTER_ADDR" == *:* ]] && MASTER_ADDR="[$MASTER_ADDR]" # IPv6
  set -- "$@" --coordinator "$MASTER_ADDR:${MASTER_PORT:-6666}" \
    --processes "$WORLD_SIZE" --process "$RANK"
fi
exec "$@"
