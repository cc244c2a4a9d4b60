#!/bin/bash
# up.sh RUN [SHARED...]: a real Slurm on one machine: a login host (slurmctld, munged) and the nodes n1 n2 n3, each with
# its own hostname, address, processes, /tmp, /dev/shm and cgroups. Needs root, the packages of ./dev, and namespaces.
#
#   RUN     a new folder for everything; it also gets in.sh, crash.sh and boot.sh
#   SHARED  folders below /tmp that all hosts share; each host has its own /tmp
#
#   RUN/in.sh n2 COMMAND   runs a command on a host as the user alice (uid 1500, home RUN/home); AS=root: as root
#   RUN/crash.sh n2        the node loses its power;  RUN/boot.sh n2  it comes back
#   down.sh RUN            ends everything
set -euo pipefail
RUN=$1; shift
NODES=3 NET=10.77.0 SHARED="$RUN $*" CPUS=$(nproc)
lab=tenax-$(basename "$(dirname "$RUN")")-$(basename "$RUN")

mkdir -p "$RUN"/{state,log,pids,home,munge}
chmod 755 "$RUN"

# --- files that all hosts share -------------------------------------------------------------------------------------
head -c 1024 /dev/urandom > "$RUN/munge/munge.key"; chmod 400 "$RUN/munge/munge.key"
{ echo "127.0.0.1 localhost"; echo "$NET.1 login"; for i in $(seq $NODES); do echo "$NET.$((10 + i)) n$i"; done; } > "$RUN/hosts"
{ grep -v '^alice:' /etc/passwd; echo "alice:x:1500:1500:Alice:$RUN/home:/bin/bash"; } > "$RUN/passwd"
{ grep -v '^alice:' /etc/group; echo "alice:x:1500:"; } > "$RUN/group"
chown 1500:1500 "$RUN/home"

if [ -d /sys/fs/cgroup/freezer ]; then CGROUP=v1; else CGROUP=none; fi # one cgroup v1 tree per node
echo $CGROUP > "$RUN/cgroup"
# cred_expire is also how long Slurm waits before it starts a requeued job.
cat > "$RUN/slurm.conf" <<CONF
ClusterName=lab
SlurmctldHost=login($NET.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$RUN/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$RUN/state
SlurmctldPidFile=$RUN/pids/slurmctld.pid
SlurmctldLogFile=$RUN/log/slurmctld.log
SlurmdSpoolDir=$RUN/%n/spool
SlurmdPidFile=$RUN/%n/slurmd.pid
SlurmdLogFile=$RUN/log/slurmd.%n.log
SlurmctldParameters=enable_configless
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
KillWait=6
SlurmdTimeout=60
SlurmctldTimeout=30
MessageTimeout=10
CompleteWait=0
JobRequeue=1
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
$(if [ $CGROUP = v1 ]; then echo "ProctrackType=proctrack/cgroup"; echo "TaskPlugin=task/cgroup,task/affinity"
  else echo "ProctrackType=proctrack/linuxproc"; echo "TaskPlugin=task/affinity"; fi)
JobCompType=jobcomp/none
NodeName=n[1-$NODES] CPUs=$CPUS Boards=1 SocketsPerBoard=1 CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=500 Gres=gpu:4 State=UNKNOWN
PartitionName=batch  Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1  PreemptMode=REQUEUE GraceTime=10
PartitionName=abrupt Nodes=ALL Default=NO  MaxTime=INFINITE State=UP PriorityTier=1  PreemptMode=REQUEUE GraceTime=0
PartitionName=urgent Nodes=ALL Default=NO  MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
cat > "$RUN/cgroup.conf" <<CONF
$([ $CGROUP = v1 ] && echo "CgroupPlugin=cgroup/v1" || echo "CgroupPlugin=autodetect")
CgroupMountpoint=/sys/fs/cgroup
ConstrainCores=yes
ConstrainRAMSpace=no
ConstrainDevices=no
CONF
echo "Name=gpu Count=4 File=/dev/tty[1-4]" > "$RUN/gres.conf" # no GPU: four devices that exist everywhere
export SLURM_CONF=$RUN/slurm.conf

# --- the first process of a host: sets up its view, starts its daemons, reaps ---------------------------------------
cat > "$RUN/init" <<'INIT'
#!/bin/bash
# In new mount, uts, net, pid, ipc and cgroup namespaces. Arguments: NAME RUN PYTHON SHARED...
name=$1 RUN=$2 python=$3; shift 3
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin SLURM_CONF=$RUN/slurm.conf LANG=C.UTF-8 HOME=/
hostname "$name"
mount --make-rprivate /
mount -t proc proc /proc
mkdir -p "$RUN/$name/tmp" "$RUN/$name/spool"
chmod 1777 "$RUN/$name/tmp"
for folder in "$@"; do
    case $folder in
    /tmp/*) mkdir -p "$RUN/$name/tmp/${folder#/tmp/}"; mount --rbind "$folder" "$RUN/$name/tmp/${folder#/tmp/}" ;;
    esac
done
case $python in
/root/*) # a Python in root's home must be usable by alice: that home is replaced by one with nothing else
    mkdir -p "$RUN/$name/python"; mount --rbind "$python" "$RUN/$name/python"
    mount -t tmpfs -o mode=755 tmpfs /root; mkdir -p "$python"; mount --rbind "$RUN/$name/python" "$python" ;;
esac
mount --rbind "$RUN/$name/tmp" /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
for file in hosts passwd group; do mount --bind "$RUN/$file" /etc/$file; done
if [ "$(cat "$RUN/cgroup")" = v1 ]; then # its own trees, of which it sees nothing but its own part
    for tree in freezer cpuset memory cpuacct devices; do
        if mountpoint -q /sys/fs/cgroup/$tree; then
            umount -l /sys/fs/cgroup/$tree && mount -t cgroup -o $tree cgroup /sys/fs/cgroup/$tree
        fi
    done
fi
ip link set lo up
while [ ! -e "$RUN/$name/network" ]; do sleep 0.05; done
start() { "$@" </dev/null >>"$RUN/log/$name.out" 2>&1 & }
if [ "$name" = login ]; then
    start munged --foreground --force --key-file="$RUN/munge/munge.key" --socket="$RUN/munge/socket" \
        --pid-file="$RUN/munge/pid" --seed-file="$RUN/munge/seed" --log-file="$RUN/log/munged.log"
    while [ ! -S "$RUN/munge/socket" ]; do sleep 0.05; done
    start slurmctld -D -i
else
    while [ ! -S "$RUN/munge/socket" ]; do sleep 0.05; done
    start slurmd -D
fi
while :; do wait -n 2>/dev/null || sleep 1; done # as process 1 it reaps whatever is left to it
INIT

# --- helpers --------------------------------------------------------------------------------------------------------
cat > "$RUN/in.sh" <<IN
#!/bin/bash
# in.sh HOST COMMAND...: runs it on that host as \${AS:-alice}, in the home folder
host=\$1; shift; pid=\$(cat "$RUN/pids/\$host") || exit 1
export SLURM_CONF=$RUN/slurm.conf
if [ "\${AS:-alice}" = root ]; then exec nsenter -t "\$pid" -m -u -i -n -p -C --wdns=/ -- "\$@"; fi
export HOME=$RUN/home USER=alice LOGNAME=alice
exec nsenter -t "\$pid" -m -u -i -n -p -C --wdns="$RUN/home" -- setpriv --reuid 1500 --regid 1500 --clear-groups -- "\$@"
IN
cat > "$RUN/boot.sh" <<BOOT
#!/bin/bash
# boot.sh HOST: starts that host's first process in namespaces of its own, and connects it
set -e
name=\$1 RUN=$RUN NET=$NET lab=$lab
mkdir -p "\$RUN/\$name"; rm -f "\$RUN/\$name/network"
if [ "\$(cat "\$RUN/cgroup")" = v1 ]; then
    for tree in freezer cpuset memory cpuacct devices; do
        mountpoint -q /sys/fs/cgroup/\$tree || continue
        for folder in /sys/fs/cgroup/\$tree/\$lab /sys/fs/cgroup/\$tree/\$lab/\$name; do
            mkdir -p \$folder
            if [ \$tree = cpuset ]; then for f in cpus mems; do cat /sys/fs/cgroup/cpuset/cpuset.\$f > \$folder/cpuset.\$f; done; fi
        done
        echo \$BASHPID > /sys/fs/cgroup/\$tree/\$lab/\$name/cgroup.procs
    done
fi
setsid unshare --mount --uts --net --pid --ipc --cgroup --fork --kill-child \\
    "\$RUN/init" "\$name" "\$RUN" "$PYTHON" $SHARED </dev/null >>"\$RUN/log/\$name.out" 2>&1 &
outer=\$!
for _ in \$(seq 100); do first=\$(cat /proc/\$outer/task/\$outer/children 2>/dev/null | tr -d ' '); [ -n "\$first" ] && break; sleep 0.05; done
[ -n "\$first" ] || { echo "boot: \$name did not start: see \$RUN/log/\$name.out" >&2; exit 1; }
echo \$first > "\$RUN/pids/\$name"
if [ "\$name" = login ]; then
    nsenter -t \$first -n sh -c "ip link add lan type bridge && ip addr add \$NET.1/24 dev lan && ip link set lan up"
else
    login=\$(cat "\$RUN/pids/login")
    nsenter -t \$login -n ip link add \$name type veth peer name eth0 netns \$first
    nsenter -t \$login -n sh -c "ip link set \$name master lan && ip link set \$name up"
    nsenter -t \$first -n sh -c "ip addr add \$NET.\$((10 + \${name#n}))/24 dev eth0 && ip link set eth0 up"
fi
touch "\$RUN/\$name/network"
BOOT
cat > "$RUN/crash.sh" <<CRASH
#!/bin/bash
# crash.sh HOST: the host loses its power: its network is gone first, so that no connection is closed in order
nsenter -t "\$(cat "$RUN/pids/login")" -n ip link del "\$1"
kill -KILL "\$(cat "$RUN/pids/\$1")" && rm -f "$RUN/pids/\$1"
CRASH
chmod +x "$RUN"/{init,in.sh,boot.sh,crash.sh}

# --- start, and wait until all nodes are idle -----------------------------------------------------------------------
"$RUN/boot.sh" login
for i in $(seq $NODES); do "$RUN/boot.sh" "n$i"; done
for _ in $(seq 120); do
    idle=$(timeout 2 "$RUN/in.sh" login sinfo -h -N -p batch -t idle -o %N 2>/dev/null | wc -l || true)
    [ "$idle" != "$NODES" ] || exit 0
    sleep 0.25
done
timeout 5 "$RUN/in.sh" login sinfo -N -l >&2 || true
tail -n 5 "$RUN"/log/* >&2 || true
echo "up: the nodes did not become idle" >&2
exit 1
