#!/bin/bash
# One worker of a JAX workload on Run:ai: the training operator's variables become ours.
set -eu -o pipefail
unset HF_TOKEN APP_SECRET
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -n "${COORDINATOR_ADDRESS:-}" && "${NUM_PROCESSES:-1}" -gt 1 ]]; then
  set -- "$@" --coordinator "$COORDINATOR_ADDRESS:${COORDINATOR_PORT:-6666}" \
    --processes "$NUM_PROCESSES" --process "$PROCESS_ID"
fi
exec "$@"
