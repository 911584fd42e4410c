#!/usr/bin/env bash
# Several processes on this machine, to try what a pod does: N processes of one CPU device each, or of one GPU each with
# DEVICES=gpu. Logs go to logs/local-PROCESS.log.
#   launch/local.sh 4 --config configs/quickstart.yaml --mesh.fsdp 2
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: $0 PROCESSES --config FILE [--section.key value ...]" >&2
    exit 2
fi
count=$1
shift
python=${PYTHON:-python}
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')
export JAX_COORDINATOR_ADDRESS=localhost:$port JAX_NUM_PROCESSES=$count
[[ ${DEVICES:-cpu} == gpu ]] || export JAX_PLATFORMS=cpu
mkdir -p logs

pids=()
trap 'kill "${pids[@]}" 2>/dev/null' INT TERM
for ((process = 0; process < count; process++)); do
    gpu=()
    [[ ${DEVICES:-cpu} != gpu ]] || gpu=(CUDA_VISIBLE_DEVICES="$process")
    env "${gpu[@]}" JAX_PROCESS_ID="$process" "$python" train.py "$@" >"logs/local-$process.log" 2>&1 &
    pids+=($!)
done
echo "started processes ${pids[*]}; tail -f logs/local-0.log"
code=0
for pid in "${pids[@]}"; do
    # A signal interrupts the wait; the process then still has to save.
    while :; do
        ended=0
        wait "$pid" || ended=$?
        kill -0 "$pid" 2>/dev/null || break
    done
    ((ended <= code)) || code=$ended
done
exit "$code"
