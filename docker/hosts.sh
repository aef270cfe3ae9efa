#!/bin/sh
# Plain hosts over ssh, without a cluster's scheduler:  docker/hosts.sh "host0 host1" IMAGE RUN.yaml [key=value ...]
# Starts the container on each host and waits; a container that fails is restarted by Docker. If a host is
# gone for good, the others continue: MIN_NODES=1. DATA of each host is /data in its container; checkpoints must lie where
# all hosts see them: variables.run=s3://BUCKET/RUN, or a DATA that the hosts share.
set -eu
[ $# -ge 3 ] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
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
for host in $hosts; do
    # AWS_* go by name alone: their values come from the remote user's own environment and stand in no command line
    ${SSH:-ssh} "$host" "docker run --detach --name foundry-moe --restart on-failure:100 --gpus all --network host \
--shm-size 64g --volume ${DATA:-/data}:/data --env AWS_ACCESS_KEY_ID --env AWS_SECRET_ACCESS_KEY \
--env AWS_SESSION_TOKEN --env NNODES=$count --env NODE_RANK=$number --env MASTER_ADDR=$master \
--env MIN_NODES=${MIN_NODES:-1} $image$quoted"
    number=$((number + 1))
done
