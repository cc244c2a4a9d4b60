"""What is refused, and in which sentence; what is only noted; and what keeps working as under torchrun."""

from __future__ import annotations

import pytest
from typed_lines import ask, cases

from tenax.cli.arguments import parse
from tenax.cli.flags import UsageError

REFUSALS = """
$
no script was named; write 'tenax run train.py', or '-m' and the name of a module
$ --tee 3
no script was named; write 'tenax run train.py', or '-m' and the name of a module
$ --nproc 4 train.py
there is no flag '--nproc', and abbreviations are not guessed at; did you mean '--nproc-per-node'?
$ --nproc_per_nodes 4 train.py
there is no flag '--nproc_per_nodes'; did you mean '--nproc-per-node'?
$ --max-restart=1 train.py
there is no flag '--max-restart', and abbreviations are not guessed at; did you mean '--max-restarts'?
$ --lr 0.1 train.py
there is no flag '--lr'; flags of your own script go behind the script's name
$ -x train.py
there is no flag '-x'; flags of your own script go behind the script's name
$ -np 4 train.py
there is no flag '-np': '--nproc-per-node N' says how many workers to start
$ --use_env train.py
there is no flag '--use_env': the workers always find their rank in the environment, so leave it out
$ --log-dir --tee 3 train.py
--log-dir needs a value, but '--tee' follows; if that is the value, write '--log-dir=--tee' in one word
$ --log_dir
--log_dir needs a value: --log_dir DIR
$ --standalone=1 train.py
--standalone takes no value, but '--standalone=1' gives it one; write it alone or leave it out
$ -mtrain
-m takes no value, but '-mtrain' gives it one; write it alone or leave it out
$ --max-restarts three train.py
--max-restarts takes a whole number of at least 0, not 'three'
$ --max_restarts -1 train.py
--max_restarts takes a whole number of at least 0, not '-1'
$ --master-port 70000 train.py
--master-port takes a whole number from 0 to 65535, not '70000'
$ --monitor-interval 0 train.py
--monitor-interval takes a number of seconds greater than 0, not '0'
$ --monitor-interval nan train.py
--monitor-interval takes a number of seconds greater than 0, not 'nan'
$ --start-method thread train.py
--start-method takes spawn, fork or forkserver, not 'thread'
$ --numa-binding chip train.py
--numa-binding takes node, socket, exclusive or core-complex, not 'chip'
$ --nproc-per-node 0 train.py
--nproc-per-node takes a number of at least 1, 'auto', 'cpu' or 'gpu', not '0'
$ --nproc-per-node 5000 train.py
--nproc-per-node takes at most 4096 workers, not '5000'
$ --nnodes 1:100000 train.py
--nnodes takes at most 65536 nodes, not '1:100000'
$ --monitor-interval 1e300 train.py
--monitor-interval takes at most 10000000000 seconds, not '1e300'
$ --nproc-per-node -2 train.py
--nproc-per-node takes a number of at least 1, 'auto', 'cpu' or 'gpu', not '-2'
$ --nnodes two train.py
--nnodes takes N, or MIN:MAX with 1 <= MIN <= MAX, not 'two'
$ --nnodes 0 train.py
--nnodes takes N, or MIN:MAX with 1 <= MIN <= MAX, not '0'
$ --nnodes 3:2 train.py
--nnodes takes N, or MIN:MAX with 1 <= MIN <= MAX, not '3:2'
$ --nnodes 1:2:3 train.py
--nnodes takes N, or MIN:MAX with 1 <= MIN <= MAX, not '1:2:3'
$ -m --no-python train
-m and --no-python say two different things about how to start the script; drop one of them
$ --run-path --module train
--module and --run-path say two different things about how to start the script; drop one of them
$ --run_path --no_python train
--no_python and --run_path say two different things about how to start the script; drop one of them
$ --standalone --nnodes 2 train.py
--standalone means this machine alone, but --nnodes 2 asks for more; drop one of them
$ --standalone --rdzv-endpoint head:29400 train.py
--standalone means this machine alone, but --rdzv-endpoint head:29400 names another; drop one of them
$ --standalone --rdzv-backend etcd train.py
--standalone needs no rendezvous, but --rdzv-backend etcd names one; drop one of them
$ --node-rank 1 train.py
--node-rank 1 is not a node of this job, which has one node, number 0; leave it out
$ --rdzv-backend c10d --master-addr head train.py
--master-addr head is for the static rendezvous, but --rdzv-backend c10d names another; drop one of them
$ --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --master_port 29501 train.py
--master_port 29501 is for the static rendezvous, but --rdzv-backend c10d names another; drop one of them
$ --rdzv-endpoint a:1 --master-port 2 train.py
--rdzv-endpoint a:1 and --master-port 2 name two different meeting places; drop one of them
$ --rdzv-endpoint host:port train.py
--rdzv-endpoint takes HOST or HOST:PORT with a port below 65536, not 'host:port'
$ --rdzv-backend c10d --rdzv-endpoint localhost:99999 train.py
--rdzv-endpoint takes HOST or HOST:PORT with a port below 65536, not 'localhost:99999'
$ --rdzv-backend= train.py
--rdzv-backend needs a name, such as 'c10d' or 'static'
$ --rdzv-conf timeout train.py
--rdzv-conf takes 'key=value,key=value', but it contains 'timeout'
$ --rdzv-conf a=1,,b=2 train.py
--rdzv-conf takes 'key=value,key=value', but it contains ''
$ --rdzv-conf token=abc,def train.py
--rdzv-conf takes 'key=value,key=value', but it contains a part that is not
$ --rdzv-conf token=abc train.py
every user of this host can read the token of --rdzv-conf in the process list; write it to a file that only you can \
read and pass '--rdzv-conf token_file=FILE', or set the variable TENAX_RDZV_TOKEN
$ --rdzv-conf endpoint=head train.py
--rdzv-conf sets 'endpoint', which is no setting of a backend; it has a flag of its own
$ -r 4 train.py
-r takes 0 (none), 1 (stdout), 2 (stderr), 3 (both), or a map of local ranks such as '0:1,1:3', not '4'
$ --tee 0:1;1:2 train.py
--tee takes 0 (none), 1 (stdout), 2 (stderr), 3 (both), or a map of local ranks such as '0:1,1:3', not '0:1;1:2'
$ --nproc-per-node 2 --tee 0:1,2:3 train.py
--tee 0:1,2:3 names local rank 2, but there are 2 workers, 0 to 1
$ --redirects 1:3 train.py
--redirects 1:3 names local rank 1, but there is one worker, number 0
$ --local-ranks-filter 0,1 train.py
--local-ranks-filter 0,1 names local rank 1, but there is one worker, number 0
$ --local-ranks-filter 0; train.py
--local-ranks-filter takes local ranks such as '0' or '0,1,2', not '0;'
$ --signals-to-handle SIGFOO train.py
--signals-to-handle: unknown signal 'SIGFOO'; use names such as SIGTERM,SIGINT,SIGHUP,SIGQUIT
$ --signals-to-handle SIGTERM,SIGKILL train.py
--signals-to-handle: SIGKILL cannot be caught; remove it
$ --notice-signals SIGFOO train.py
--notice-signals: unknown signal 'SIGFOO'; use names such as SIGTERM,SIGINT,SIGHUP,SIGQUIT
$ --notice-signals SIGUSR1,SIGTERM train.py
SIGTERM is in --notice-signals and in --signals-to-handle, but a signal either announces that this machine will be \
taken or stops the job; take it out of one of them
$ --signals-to-handle SIGTERM,SIGUSR1 --notice_signals SIGUSR1 train.py
SIGUSR1 is in --notice_signals and in --signals-to-handle, but a signal either announces that this machine will be \
taken or stops the job; take it out of one of them
$ --rdzv-backend mine --notice-signals SIGUSR1 train.py
--notice-signals SIGUSR1 needs a rendezvous of tenax to pass the notice on, but --rdzv-backend mine names another; \
drop one of them
$ --notice-seconds 0 train.py
--notice-seconds takes a number of seconds greater than 0, not '0'
$ --fatal-exit-codes 0 train.py
--fatal-exit-codes takes exit codes from 1 to 255 such as '2,64', not '0'
$ --fatal-exit-codes 3,256 train.py
--fatal-exit-codes takes exit codes from 1 to 255 such as '2,64', not '3,256'
$ --fatal-exit-codes=-9 train.py
--fatal-exit-codes takes exit codes from 1 to 255 such as '2,64', not '-9'
$ PET_FATAL_EXIT_CODES=SIGKILL train.py
PET_FATAL_EXIT_CODES takes exit codes from 1 to 255 such as '2,64', not 'SIGKILL'
$ --fatal-errors ValueError:3 train.py
--fatal-errors takes names of exceptions such as 'ValueError,ConfigError', not 'ValueError:3'
$ --restart-policy mine:Own --fatal-exit-codes 3 train.py
--fatal-exit-codes is for the restart policy 'budget', and 'mine:Own' was chosen; use one of the two
$ PET_RESTART_POLICY=mine:Own --fatal-errors ValueError train.py
--fatal-errors is for the restart policy 'budget', and 'mine:Own' was chosen; use one of the two
$ --shutdown-timeout -5 train.py
--shutdown-timeout takes a whole number of at least 0, not '-5'
$ PET_STANDALONE=maybe train.py
PET_STANDALONE takes 0, 1, true, false, yes or no, not 'maybe'
$ PET_MAX_RESTARTS=many train.py
PET_MAX_RESTARTS takes a whole number of at least 0, not 'many'
$ PET_START_METHOD=thread train.py
PET_START_METHOD takes spawn, fork or forkserver, not 'thread'
$ PET_STANDALONE=1 PET_NNODES=4 train.py
PET_STANDALONE=1 means this machine alone, but PET_NNODES=4 asks for more; drop one of them
$ PET_NO_PYTHON=1 -m train
-m and PET_NO_PYTHON=1 say two different things about how to start the script; drop one of them
$ PET_NODE_RANK=3 train.py
PET_NODE_RANK=3 is not a node of this job, which has one node, number 0; leave it out
$ PET_TEE=5:3 train.py
PET_TEE=5:3 names local rank 5, but there is one worker, number 0
$ TORCH_ELASTIC_SHUTDOWN_TIMEOUT=soon train.py
TORCH_ELASTIC_SHUTDOWN_TIMEOUT takes a whole number of seconds of at least 0, not 'soon'
$ TORCH_ELASTIC_SHUTDOWN_TIMEOUT=-1 train.py
TORCH_ELASTIC_SHUTDOWN_TIMEOUT takes a whole number of seconds of at least 0, not '-1'
"""

NOTES = """
$ --monitor-interval 0.2 train.py
--monitor-interval 0.2 has no effect: tenax hears of a worker's end from the kernel at once
$ --start-method fork train.py
--start-method fork has no effect: each worker is a new interpreter (it is for --run-path)
$ --rdzv-backend c10d --rdzv-conf jion_timeout=9,timeout=3 train.py
unknown --rdzv-conf key 'jion_timeout', which has no effect
$ --fatal-exit-codes 3 train.py
--fatal-exit-codes 3 has no effect: no restarts are allowed (--max-restarts)
$ --notice-seconds 60 train.py
--notice-seconds 60 has no effect without --notice-signals
$ --duplicate-stdout-filters loss -r 3 train.py
--duplicate-stdout-filters has no effect: only teed lines are copied (--tee 1)
$ --duplicate_stderr_filters error train.py
--duplicate_stderr_filters has no effect: only teed lines are copied (--tee 2)
$ --rdzv-backend etcd --rdzv-endpoint store:2379 train.py
--rdzv-backend etcd is not asked: one node has nobody to find
$ train.py --nproc-per-node=4
'--nproc-per-node=4' stands behind the script, so it goes to the script and not to tenax
$ PET_NNODES=4 PET_NODE_RANK=2 PET_MASTER_ADDR=head PET_MASTER_PORT=29500 --standalone train.py
PET_NNODES=4 is not used, because of --standalone
PET_NODE_RANK=2 is not used, because of --standalone
PET_MASTER_ADDR=head is not used, because of --standalone
PET_MASTER_PORT=29500 is not used, because of --standalone
$ PET_NODE_RANK=2 PET_MASTER_ADDR=head --nnodes 1 train.py
PET_NODE_RANK=2 is not used, because of --nnodes 1
PET_MASTER_ADDR=head is not used, because of --nnodes 1
$ PET_RDZV_ENDPOINT=head:29400 PET_RDZV_BACKEND=etcd --standalone train.py
PET_RDZV_ENDPOINT=head:29400 is not used, because of --standalone
PET_RDZV_BACKEND=etcd is not used, because of --standalone
$ PET_RDZV_BACKEND=c10d --master-port 29501 train.py
PET_RDZV_BACKEND=c10d is not used, because of --master-port 29501
$ PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=head:29400 --master-port 29501 train.py
PET_RDZV_BACKEND=c10d is not used, because of --master-port 29501
PET_RDZV_ENDPOINT=head:29400 is not used, because of --master-port 29501
$ PET_RDZV_ENDPOINT=head:29400 --master-addr localhost train.py
PET_RDZV_ENDPOINT=head:29400 is not used, because of --master-addr localhost
$ PET_MASTER_ADDR=head PET_RDZV_BACKEND=c10d train.py
PET_MASTER_ADDR=head is not used, because of PET_RDZV_BACKEND=c10d
"""

# What works in silence, and where the workers then meet: backend and endpoint of the launch.
ACCEPTED = """
$ train.py
local -
$ --standalone train.py
local -
$ --standalone --nnodes=1 --nproc-per-node=2 train.py
local -
$ --standalone --rdzv-backend=c10d --rdzv-endpoint=localhost:0 train.py
local -
$ --standalone --rdzv-endpoint 127.0.0.1:29400 train.py
local -
$ --standalone --master_port=12345 train.py
static 127.0.0.1:12345
$ --nnodes=1 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --rdzv-id=x train.py
c10d localhost:0
$ --nnodes=1:1 --rdzv_backend=c10d --rdzv_endpoint=node17:29400 train.py
c10d node17:29400
$ --rdzv-backend c10d --rdzv-conf store_type=file --rdzv-endpoint /tmp/store train.py
c10d /tmp/store
$ --rdzv-backend static train.py
local -
$ --rdzv-backend tcp --rdzv-conf join_timeout=900,timeout=60 train.py
tcp -
$ --master-port 29501 train.py
static 127.0.0.1:29501
$ --master-addr localhost --master-port 29501 --nnodes 1 --node-rank 0 train.py
static localhost:29501
$ --node-rank 0 --master-addr localhost train.py
static localhost:0
$ --master-addr ::1 train.py
static [::1]:0
$ --rdzv-endpoint [::1]:29501 train.py
static [::1]:29501
$ --rdzv-endpoint localhost train.py
static localhost:0
$ --rdzv-endpoint localhost:7 --master-addr localhost --master-port 7 train.py
static localhost:7
$ --start-method spawn --event-log-handler null --local-addr 10.0.0.1 train.py
local -
$ --duplicate-stdout-filters loss --tee 0:3 train.py
local -
$ --signals-to-handle SIGTERM,SIGUSR1 train.py
local -
$ --run-path --start-method fork train.py
local -
$ --notice-signals SIGUSR1,SIGUSR2 --notice-seconds 60 train.py
local -
$ --max-restarts 3 --fatal-exit-codes 2,64 --fatal-errors ValueError,my.Error train.py
local -
$ PET_FATAL_ERRORS=ValueError PET_NOTICE_SECONDS=60 train.py
local -
$ PET_RDZV_CONF=token=abc train.py
local -
$ --rdzv-conf use_agent_store=no,node_order=3,token_file=/secret train.py
local -
$ PET_NNODES=1 PET_NODE_RANK=0 PET_MASTER_ADDR=pod-0.job PET_MASTER_PORT=29500 PET_NPROC_PER_NODE=2 train.py
static pod-0.job:29500
$ PET_MONITOR_INTERVAL=5 PET_START_METHOD=fork train.py
local -
$ PET_RDZV_BACKEND=etcd-v2 PET_RDZV_ENDPOINT=store:2379 train.py
local -
$ PET_NNODES=2 --nnodes 1 train.py
local -
"""


@pytest.mark.parametrize(("words", "expected"), cases(REFUSALS))
def test_refused_in_one_sentence(words, expected) -> None:
    """A request that cannot be honoured is refused, in this one sentence."""
    with pytest.raises(UsageError) as refusal:
        ask(words)
    assert [str(refusal.value)] == expected


@pytest.mark.parametrize(("words", "expected"), cases(NOTES))
def test_noted(words, expected) -> None:
    """What has no effect, or gives way to the command line, is said, and the job runs."""
    assert list(ask(words).notes) == expected


@pytest.mark.parametrize(("words", "expected"), cases(ACCEPTED))
def test_accepted_in_silence(words, expected) -> None:
    """Single-node uses of torchrun's command line work as they stand."""
    options = ask(words)
    assert options.notes == ()
    assert [f"{options.rdzv_backend} {options.rdzv_endpoint or '-'}"] == expected


def test_the_clusters_place_is_not_ours() -> None:
    """A node that runs alone does not meet its workers on the cluster's master."""
    environ = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "head", "PET_MASTER_PORT": "29500"}
    options = parse(["--standalone", "train.py"], environ)
    assert (options.rdzv_backend, options.rdzv_endpoint) == ("local", "")


@pytest.mark.parametrize(
    ("role", "problem"),
    [
        ("a\nb", "it contains characters that cannot be printed"),
        ("r" * 256, "it has 256 characters, and at most 255 are allowed"),
    ],
)
def test_a_role_that_other_nodes_would_reject_is_refused(role: str, problem: str) -> None:
    """At the flag, with the reason, and not by a connection that is closed."""
    with pytest.raises(UsageError, match=problem):
        parse(["--role", role, "train.py"], {})
