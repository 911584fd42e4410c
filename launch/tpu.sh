#!/usr/bin/env bash
# Creates a Cloud TPU slice with gcloud, installs this repository on every host and starts a run:
#   PROJECT=my-project ZONE=us-east5-a BUCKET=gs://my-bucket launch/tpu.sh v5p-256 \
#     --config configs/orthros_1b3_fineweb_edu.yaml --config configs/pods/1b3_v5p_4x4x8.yaml
# The first argument is the accelerator type, which counts TensorCores for v5p (two a chip) and chips for v5e and v6e:
# v5litepod-256, v5p-256 (128 chips), v6e-256. The same command again updates the code and continues the run.
set -euo pipefail

if [[ $# -lt 2 ]]; then
    echo "usage: PROJECT=.. ZONE=.. BUCKET=gs://.. $0 ACCELERATOR_TYPE --config FILE [--section.key value ...]" >&2
    exit 2
fi
: "${PROJECT:?name the Google Cloud project}" "${ZONE:?name the zone}" "${BUCKET:?name the bucket of data and runs}"
accelerator=$1
shift
name=${NAME:-orthros}
case $accelerator in
    v5litepod-*) version=v2-alpha-tpuv5-lite ;;
    v5p-*) version=v2-alpha-tpuv5 ;;
    v6e-*) version=v2-alpha-tpuv6e ;;
    *)
        echo "$0: no software version is known for $accelerator; it takes v5litepod-N, v5p-N and v6e-N" >&2
        exit 2
        ;;
esac
tpu=(gcloud compute tpus tpu-vm)
place=(--project "$PROJECT" --zone "$ZONE")

on_every_host() {
    "${tpu[@]}" ssh "$name" "${place[@]}" --worker all --command "$1"
}

if ! "${tpu[@]}" describe "$name" "${place[@]}" >/dev/null 2>&1; then
    "${tpu[@]}" create "$name" "${place[@]}" --accelerator-type "$accelerator" --version "$version" ${SPOT:+--spot}
fi
archive=$(mktemp)
trap 'rm -f "$archive"' EXIT
git archive --format tar.gz --output "$archive" HEAD
"${tpu[@]}" scp "$archive" "$name:orthros.tar.gz" "${place[@]}" --worker all

# Data and runs lie in the bucket, which every host mounts as a folder.
on_every_host "set -e
command -v gcsfuse >/dev/null || (
    echo 'deb [signed-by=/usr/share/keyrings/cloud.google.asc] https://packages.cloud.google.com/apt gcsfuse-'\$(lsb_release -cs)' main' |
        sudo tee /etc/apt/sources.list.d/gcsfuse.list
    curl -s https://packages.cloud.google.com/apt/doc/apt-key.gpg | sudo tee /usr/share/keyrings/cloud.google.asc >/dev/null
    sudo apt-get update -q && sudo apt-get install -qy gcsfuse python3.12-venv
)
mkdir -p orthros bucket
mountpoint -q bucket || gcsfuse --implicit-dirs ${BUCKET#gs://} bucket
tar xzf orthros.tar.gz -C orthros
cd orthros
for folder in data runs; do mkdir -p ../bucket/\$folder && ln -sfn ../bucket/\$folder \$folder; done
test -d venv || python3.12 -m venv venv
venv/bin/pip install -q -r requirements-tpu.txt"

printf -v arguments '%q ' "$@"
on_every_host "cd orthros && mkdir -p ../bucket/logs &&
    export JAX_COMPILATION_CACHE_DIR=\$HOME/compile_cache &&
    venv/bin/python train.py $arguments 2>&1 | tee -a ../bucket/logs/$name-\$(hostname).log; exit \${PIPESTATUS[0]}"
