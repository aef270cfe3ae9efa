#!/bin/sh
# Healthy: the launcher runs, and if a heartbeat file is named it was touched in the last HEARTBEAT_S seconds.
#   HEARTBEAT    a file that a run with elastic_checkpoint touches at each batch, or its log; unset: only the launcher is
#                looked for
#   HEARTBEAT_S  default 1800: evaluation and the first compilation are silent for minutes
#   PROC         default /proc
set -eu
found=1
for process in "${PROC:-/proc}"/[0-9]*; do
    [ -r "$process/cmdline" ] || continue
    case $(tr '\0' ' ' <"$process/cmdline" 2>/dev/null) in
        *foundry_moe.launch.* | *foundry-moe\ train* | *bin/torchrun* | *bin/composer*) found=0 && break ;;
    esac
done
if [ $found -ne 0 ]; then
    echo "unhealthy: no launcher is running"
    exit 1
fi
if [ -n "${HEARTBEAT:-}" ]; then
    [ -e "$HEARTBEAT" ] || { echo "unhealthy: $HEARTBEAT does not exist"; exit 1; }
    age=$(($(date +%s) - $(stat -c %Y "$HEARTBEAT")))
    if [ "$age" -gt "${HEARTBEAT_S:-1800}" ]; then
        echo "unhealthy: $HEARTBEAT was last touched $age s ago"
        exit 1
    fi
fi
echo healthy
