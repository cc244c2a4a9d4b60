#!/bin/bash
# down.sh RUN: ends what up.sh started in that folder, by process id: the first process of each host takes its whole pid
# namespace with it.
RUN=$1 lab=tenax-$(basename "$(dirname "$1")")-$(basename "$1")
for file in "$RUN"/pids/n[0-9]* "$RUN"/pids/login; do
    [ -e "$file" ] || continue
    pid=$(cat "$file")
    grep -q "$RUN/init" "/proc/$pid/cmdline" 2>/dev/null || continue # the number belongs to another process by now
    kill -KILL "$pid" 2>/dev/null
done
for _ in $(seq 50); do grep -qs . /sys/fs/cgroup/freezer/"$lab"/*/cgroup.procs || break; sleep 0.1; done
for tree in freezer cpuset memory cpuacct devices; do
    [ ! -d /sys/fs/cgroup/$tree/"$lab" ] || find /sys/fs/cgroup/$tree/"$lab" -depth -type d -exec rmdir {} + 2>/dev/null
done
rm -rf --one-file-system "$RUN"
