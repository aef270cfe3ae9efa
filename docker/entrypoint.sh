#!/bin/sh
# Starts training with the cluster's environment variables for this node.
#
#   entrypoint.sh RUN.yaml [key=value ...]    trains: foundry_moe/train.py under foundry_moe/launch/torchrun.py
#   entrypoint.sh store                       serves the rendezvous of all nodes from a machine that has no part in them
#   entrypoint.sh -- COMMAND ...              runs a command instead
#
# Where the nodes are comes from the first of these that is there:
#   Slurm               SLURM_JOB_ID, SLURM_NNODES, SLURM_NODEID, and MASTER_ADDR or SLURM_JOB_NODELIST (scontrol)
#   Kubernetes          JOB_COMPLETION_INDEX of an Indexed Job, NNODES, MASTER_ADDR
#   plain hosts         NNODES, NODE_RANK, MASTER_ADDR
#   one node            none of them
# NPROC        processes on this node (default: the GPUs here, or 1)
# MIN_NODES    continue with as few (default: NNODES): checkpoints load on any number of processes
# STORE        HOST:PORT of that store; unset: it is on node 0, whose loss then ends the job. It may restart: agents wait 300 s
# MAX_RESTARTS restarts after failures (default 100); a user's mistake ends the job at once, with exit code 2, values
#              that are not finite with 3, a folder that another run has taken over with 4
# FOUNDRY_MOE_TOKEN, FOUNDRY_MOE_TOKEN_FILE  a secret that all nodes share: it signs the state of the rendezvous
# NODE_CHECK   1: check this node's processors before it joins, 0: do not (default: 1 on several nodes). A node that fails
#              exits with code 5 and should not be started again
# HEARTBEAT    a file that is touched at each start and, with elastic_checkpoint, at each batch, for healthcheck.sh
# SIGTERM, or another of elastic_checkpoint.signals, is passed on; the last batch is saved within elastic_checkpoint.grace,
# and the exit code is 75: start it again
# MASTER_PORT  default 29500
# LAST_CALL_S  how long a start waits for more nodes once MIN_NODES are there (default 30; a restart 1.5 and 0.01 per node at most)
# NODE_SILENCE_S  a node whose launcher is silent for so long is lost, and the others restart without it (default 10)
# FOUNDRY_MOE_FORK_SERVER=0  each training process imports for itself, and none is forked (launch/fork_server.py)
# DRY_RUN=1    prints the command, one word per line, and runs nothing
set -eu

die() {
    echo "entrypoint: $*" >&2
    exit 2
}

is_count() { # without leading zeros, which the shell's arithmetic takes for octal
    case $1 in '' | *[!0-9]* | 0*) return 1 ;; *) return 0 ;; esac
}

is_number() {
    [ "$1" = 0 ] || is_count "$1"
}

is_decimal() {
    case $1 in '' | . | *[!0-9.]* | *.*.*) return 1 ;; *) return 0 ;; esac
}

check_port() { # NAME VALUE
    { is_count "$2" && [ ${#2} -le 5 ] && [ "$2" -le 65535 ]; } || die "$1 ($2) must be from 1 to 65535"
}

if [ $# -eq 0 ] || [ "$1" = --help ]; then
    sed -n '2,/^set -eu/s/^# \{0,1\}//p' "$0"
    exit 0
fi
if [ "$1" = store ]; then
    check_port MASTER_PORT "${MASTER_PORT:-29500}"
    exec python -m foundry_moe.launch.rendezvous "${MASTER_PORT:-29500}"
fi
if [ "$1" = -- ]; then
    shift
    [ $# -gt 0 ] || die "-- needs a command after it"
    exec "$@"
fi

# Which node is this, of how many, and who is the first?
where="one node"
nodes=${NNODES:-1}
rank=${NODE_RANK:-0}
master=${MASTER_ADDR:-}
STORE=${STORE:-}
job=${RUN_NAME:-foundry-moe}
if [ -n "${SLURM_JOB_ID:-}" ]; then
    where=Slurm
    nodes=${SLURM_NNODES:-${SLURM_JOB_NUM_NODES:-1}}
    rank=${SLURM_NODEID:-0}
    job=slurm-$SLURM_JOB_ID
    if [ -z "$master$STORE" ] && [ "$nodes" != 1 ]; then
        [ -n "${SLURM_JOB_NODELIST:-}" ] || die "SLURM_JOB_NODELIST and MASTER_ADDR are both unset: set MASTER_ADDR"
        master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" 2>/dev/null | head -n 1)
        [ -n "$master" ] || die "scontrol is not in this container or names no node: set MASTER_ADDR in the job script"
    fi
elif [ -n "${JOB_COMPLETION_INDEX:-}" ]; then
    where=Kubernetes
    rank=$JOB_COMPLETION_INDEX
    [ -n "${NNODES:-}" ] || die "NNODES is unset: set it to the Job's completions"
elif [ -n "${NNODES:-}" ]; then
    where="plain hosts"
    [ "$nodes" = 1 ] || [ -n "${NODE_RANK:-}" ] || die "NODE_RANK is unset: give each host its number, from 0"
fi

is_count "$nodes" || die "the number of nodes ($nodes) must be a positive whole number without leading zeros"
is_number "$rank" || die "this node's number ($rank) must be a whole number from 0, without leading zeros"
[ "$rank" -lt "$nodes" ] || die "this node's number ($rank) must be below the number of nodes ($nodes)"
if [ "$nodes" -gt 1 ] && [ -z "$STORE" ]; then
    [ -n "$master" ] || die "MASTER_ADDR is unset: set it to the name of node 0, or set STORE"
fi
case ${STORE:-HOST:1} in ?*:*) ;; *) die "STORE ($STORE) must be HOST:PORT" ;; esac
[ -z "$STORE" ] || check_port "the port of STORE" "${STORE##*:}"
port=${MASTER_PORT:-29500}
check_port MASTER_PORT "$port"
call=${LAST_CALL_S:-30}
is_number "$call" || die "LAST_CALL_S ($call) must be whole seconds"
is_decimal "${LINK_GB_S:-0}" || die "LINK_GB_S ($LINK_GB_S) must be GB/s, a number"

# How many processes run here?
processes=${NPROC:-}
if [ -z "$processes" ]; then
    processes=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
    [ "${processes:-0}" -gt 0 ] || processes=1
fi
is_count "$processes" || die "NPROC ($processes) must be a positive whole number"
least=${MIN_NODES:-$nodes}
{ is_count "$least" && [ "$least" -le "$nodes" ]; } || die "MIN_NODES ($least) must be from 1 to the number of nodes ($nodes)"
restarts=${MAX_RESTARTS:-100}
is_number "$restarts" || die "MAX_RESTARTS ($restarts) must be a whole number"

# shellcheck disable=SC3045 # dash and bash have these options
# gloo opens a connection, thus a descriptor, to every other rank in each group: 6,150 per process of 3,072 ranks.
ulimit -S -n "$(ulimit -H -n)" 2>/dev/null || true
export TORCH_GLOO_LAZY_INIT="${TORCH_GLOO_LAZY_INIT:-1}" # only connections that are used
# shellcheck disable=SC3045
pinned=$(ulimit -l)
if [ -d /dev/infiniband ] && [ "$pinned" != unlimited ] && [ "$(id -u)" -ne 0 ]; then
    echo "entrypoint: RDMA pins memory, and the limit here is $pinned KiB (ulimit -l): make it unlimited" >&2
fi

if [ "${DRY_RUN:-}" != 1 ] && command -v foundry-moe >/dev/null 2>&1; then
    # A mistake in the YAML fails every time: torchrun would restart it MAX_RESTARTS times.
    case $1 in
        *.yaml | *.yml)
            WORLD_SIZE=$((nodes * processes)) LOCAL_WORLD_SIZE=$processes foundry-moe check --data "$@" >&2 || [ $? -ne 2 ] || exit 2
            ;;
    esac
fi

export NODE_RANK="$rank" # Composer reads it, and torchrun does not set it
# After a restart PyTorch would use the previous round's store, where a rank may find addresses of ended peers
# there: seen on torch 2.11 with gloo. A store for each start instead; on several nodes its port is any free one of node 0.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
script=${TRAIN_SCRIPT:-foundry_moe/train.py}
if [ "$nodes" -eq 1 ]; then
    set -- python -m foundry_moe.launch.torchrun --standalone --nproc-per-node "$processes" --max-restarts "$restarts" "$script" "$@"
else
    span=$nodes
    [ "$least" -eq "$nodes" ] || span=$least:$nodes
    # the store is on node 0, also when a node is restarted there under another rank
    is_host=false
    # A restart waits until a lost node has left the rendezvous: 4 s, and 6 s for more nodes, which share one store.
    alive=keep_alive_interval=1,keep_alive_max_attempt=4
    [ "$nodes" -le 16 ] || alive=keep_alive_interval=2,keep_alive_max_attempt=3
    [ "$rank" -ne 0 ] || [ -n "$STORE" ] || is_host=true
    set -- python -m foundry_moe.launch.torchrun --nnodes "$span" --nproc-per-node "$processes" --max-restarts "$restarts" \
        --rdzv-backend foundry --rdzv-id "$job" --rdzv-endpoint "${STORE:-$master:$port}" \
        --rdzv-conf "is_host=$is_host,join_timeout=900,last_call_timeout=$call,$alive" "$script" "$@"
fi

if [ "${DRY_RUN:-}" = 1 ]; then
    printf '%s\n' "$@"
    exit 0
fi
[ -z "${HEARTBEAT:-}" ] || touch "$HEARTBEAT"
if [ "${NODE_CHECK:-$((nodes > 1))}" = 1 ]; then
    python -m foundry_moe.launch.node_check >&2 || exit $?
fi
echo "entrypoint: $where, node $rank of $nodes, $processes processes: $*" >&2
exec "$@"
