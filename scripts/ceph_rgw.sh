#!/usr/bin/env bash
# A Ceph object gateway of one machine, for tests: one monitor, one OSD, one gateway, all on 127.0.0.1, no container.
#
#   scripts/ceph_rgw.sh start FOLDER    starts it with new, empty data; prints the endpoint; writes FOLDER/env.sh
#   scripts/ceph_rgw.sh stop FOLDER     stops it and deletes the folder
#   . FOLDER/env.sh                     sets AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION
#
# Debian: apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common (16.2 in Debian 12)
set -euo pipefail

usage() { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[[ $# -eq 2 ]] || usage
action=$1
folder=$(realpath -m "$2")
export CEPH_CONF=$folder/ceph.conf

free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

stop() {
    local pid_file pid
    for pid_file in "$folder"/{rgw,osd,mon}.pid; do
        [[ -f $pid_file ]] || continue
        pid=$(<"$pid_file")
        kill "$pid" 2>/dev/null || continue
        for _ in {1..50}; do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        kill -9 "$pid" 2>/dev/null || true
    done
}

fail() {
    echo "error: $1; see $folder/*.log" >&2
    tail -n 5 "$folder"/*.log >&2 || true
    stop
    exit 1
}

start() {
    for tool in ceph-mon ceph-osd radosgw radosgw-admin monmaptool; do
        command -v "$tool" >/dev/null || { echo "error: $tool is not installed; the head of $0 says how" >&2; exit 3; }
    done
    [[ ! -e $folder/ceph.conf ]] || { echo "error: $folder is in use; run: $0 stop $folder" >&2; exit 2; }
    mkdir -p "$folder"/{mon,osd}
    local fsid uuid mon_port port
    fsid=$(</proc/sys/kernel/random/uuid)
    uuid=$(</proc/sys/kernel/random/uuid)
    mon_port=$(free_port)
    port=$(free_port)
    cat > "$CEPH_CONF" <<CONF
[global]
fsid = $fsid
mon host = [v2:127.0.0.1:$mon_port/0]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
run dir = $folder
admin socket = $folder/\$name.asok
log file = $folder/\$name.log
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail crit = 1
mon warn on insecure global id reclaim allowed = false
[mon]
mon data = $folder/mon
[osd]
osd data = $folder/osd
osd objectstore = bluestore
bluestore block size = 21474836480
osd memory target = 1073741824
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:$port
ms mon client mode = crc secure
rgw enable usage log = false
rgw gc obj min wait = 60
CONF
    monmaptool --create --fsid "$fsid" --addv a "[v2:127.0.0.1:$mon_port/0]" "$folder/monmap" >/dev/null
    ceph-mon --mkfs -i a --monmap "$folder/monmap" 2>>"$folder/mon.a.log" || fail "the monitor's store could not be made"
    ceph-mon -i a --pid-file "$folder/mon.pid" 2>>"$folder/mon.a.log" || fail "the monitor does not start"
    timeout 60 ceph osd new "$uuid" >/dev/null 2>>"$folder/mon.a.log" || fail "the monitor does not answer"
    ceph-osd --mkfs -i 0 --osd-uuid "$uuid" >>"$folder/osd.0.log" 2>&1 || fail "the OSD's store could not be made"
    ceph-osd -i 0 --pid-file "$folder/osd.pid" >>"$folder/osd.0.log" 2>&1 || fail "the OSD does not start"
    timeout 120 radosgw -n client.rgw --pid-file "$folder/rgw.pid" >>"$folder/client.rgw.log" 2>&1 || fail "the gateway does not start"
    for _ in {1..240}; do
        (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && break
        sleep 0.5
    done
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || fail "the gateway does not answer"
    timeout 60 radosgw-admin -n client.rgw user create --uid test --display-name test --access-key testing \
        --secret-key testing >/dev/null 2>>"$folder/client.rgw.log" || fail "no user could be made"
    cat > "$folder/env.sh" <<ENV
export AWS_ENDPOINT_URL=http://127.0.0.1:$port AWS_ACCESS_KEY_ID=testing AWS_SECRET_ACCESS_KEY=testing
export AWS_DEFAULT_REGION=us-east-1
ENV
    echo "http://127.0.0.1:$port"
}

case $action in
    start) start ;;
    stop) stop; rm -rf "$folder" ;;
    *) usage ;;
esac
