#!/usr/bin/env bash
# Starts a run on TPU slices of a GKE cluster that xpk made (https://github.com/AI-Hypercomputer/xpk):
#   PROJECT=my-project ZONE=us-east5-a CLUSTER=my-cluster launch/xpk.sh v5p-256 \
#     --config configs/orthros_1b3_fineweb_edu.yaml --config configs/pods/1b3_v5p_4x4x8.yaml
# STORAGE names a storage of the cluster (xpk storage attach) whose folders `data` and `runs` all hosts see at /storage.
set -euo pipefail

if [[ $# -lt 2 ]]; then
    echo "usage: PROJECT=.. ZONE=.. CLUSTER=.. STORAGE=.. $0 TPU_TYPE --config FILE [--section.key value ...]" >&2
    exit 2
fi
: "${PROJECT:?name the Google Cloud project}" "${ZONE:?name the zone}" "${CLUSTER:?name the cluster}"
: "${STORAGE:?name the storage that is mounted at /storage}"
tpu_type=$1
shift
printf -v arguments '%q ' "$@"

# Kubernetes restarts the pods of a preempted slice; the same command then continues from the newest checkpoint.
exec xpk workload create \
    --project "$PROJECT" --zone "$ZONE" --cluster "$CLUSTER" \
    --workload "${NAME:-orthros}" --tpu-type "$tpu_type" --num-slices "${SLICES:-1}" \
    --max-restarts "${RESTARTS:-50}" --storage "$STORAGE" \
    --base-docker-image "${IMAGE:-python:3.12}" --script-dir . \
    --command "pip install -q -r requirements-tpu.txt &&
        ln -sfn /storage/data data && ln -sfn /storage/runs runs &&
        JAX_COMPILATION_CACHE_DIR=/storage/compile_cache python train.py $arguments"
