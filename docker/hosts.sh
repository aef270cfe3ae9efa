#!/bin/sh
# Plain hosts over ssh, without a cluster's scheduler:  docker/hosts.sh "host0 host1" IMAGE RUN.yaml [key=value ...]
# Starts a detached container on each host. Docker restarts one that fails, and none whose exit code is final: a user's
# mistake (2), values that are not finite (3), a folder that another run took over (4), a bad node (5), a stop on request
# (75, 130). If a host is gone for good, the others continue: MIN_NODES=1. STORE=HOST:PORT names a rendezvous store off
# these hosts (entrypoint.sh). DATA of each host is /data in its container; checkpoints must lie where all hosts see them:
# variables.run=s3://BUCKET/RUN, or a DATA that the hosts share. Variables of entrypoint.sh and AWS_* are those of the remote
# user. ENV_FILE names a file on each host, in the form of docker's --env-file, for any others (NCCL_*, AZURE_*).
# Stop a host's containers:  docker stop $(docker ps --quiet --filter label=foundry-moe)
set -eu
[ $# -ge 3 ] || { sed -n '2,10s/^# //p' "$0" >&2; exit 2; }
hosts=$1 image=$2
shift 2
count=0
for host in $hosts; do count=$((count + 1)); done
master=${hosts%% *}
number=0
quoted=
for word in "$@"; do
    quoted="$quoted '$(printf %s "$word" | sed "s/'/'\\\\''/g")'"
done
# Docker restarts after every code but 0. The shell outlives the signal that tini sends to the whole group.
# shellcheck disable=SC2016
obey='trap : TERM INT USR1 HUP; entrypoint.sh "$@"; code=$?
case $code in 2 | 3 | 4 | 5 | 75 | 130) echo "ended with exit code $code, which is final" >&2; exit 0 ;; esac; exit $code'
# shellcheck disable=SC2016
devices='$(test ! -d /dev/infiniband || echo --device /dev/infiniband)'
named=
for name in AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_REGION FOUNDRY_MOE_TOKEN FOUNDRY_MOE_TOKEN_FILE \
    FOUNDRY_MOE_FORK_SERVER MASTER_PORT NPROC MAX_RESTARTS NODE_CHECK HEARTBEAT LAST_CALL_S NODE_SILENCE_S LINK_GB_S RUN_NAME \
    TRAIN_SCRIPT; do
    named="$named --env $name"
done
for host in $hosts; do
    # names alone: the values come from the remote user's own environment and are in no command line
    ${SSH:-ssh} "$host" "docker run --detach --label foundry-moe --restart on-failure:100 --stop-timeout 120 --gpus all \
--network host --shm-size 64g --ulimit memlock=-1 --ulimit nofile=1048576 $devices \
--volume ${DATA:-/data}:/data ${ENV_FILE:+--env-file $ENV_FILE} $named --env NNODES=$count --env NODE_RANK=$number --env MASTER_ADDR=$master \
--env MIN_NODES=${MIN_NODES:-1} --env STORE=${STORE:-} --entrypoint tini $image -g -- sh -c '$obey' sh$quoted"
    number=$((number + 1))
done
