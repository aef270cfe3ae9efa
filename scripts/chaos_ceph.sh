#!/usr/bin/env bash
# Kills on Ceph RGW: of the checkpoint engine, then of the demo's run behind a proxy with faults.
#
#   scripts/chaos_ceph.sh PYTHON DATA
#
# Uses the S3 server of AWS_ENDPOINT_URL if that is set, with its credentials in AWS_* and an existing bucket in FOLDER;
# starts a Ceph of its own if not. ENGINE_KILLS (200) and RUN_KILLS (6) say how many.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 data=$2
folder=${FOLDER:-s3://chaos/run}
if [[ -z ${AWS_ENDPOINT_URL:-} ]]; then
    ceph=$(mktemp -d)/ceph
    trap 'scripts/ceph_rgw.sh stop "$ceph"; rmdir "$(dirname "$ceph")"' EXIT
    scripts/ceph_rgw.sh start "$ceph"
    # shellcheck disable=SC1091
    . "$ceph/env.sh"
    bucket=${folder#s3://}
    "$python" -c 'import boto3, sys; boto3.client("s3").create_bucket(Bucket=sys.argv[1])' "${bucket%%/*}"
fi
"$python" -m tests.chaos.engine_kills --kills "${ENGINE_KILLS:-200}" --folder "$folder-engine" \
    --endpoint-url "$AWS_ENDPOINT_URL"
"$python" -m tests.chaos.run_kills --data "$data" --kills "${RUN_KILLS:-6}" --batches 20 --folder "$folder-demo" \
    --endpoint-url "$AWS_ENDPOINT_URL"
