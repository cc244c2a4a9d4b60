"""Command lines of one node: which are rejected, which get a note, and which work as under torchrun."""

from __future__ import annotations

import pytest
from command_lines import cases, parse_line

from tenax.cli.arguments import parse
from tenax.cli.flags import UsageError

REFUSALS = """
$
no script given; write 'tenax run train.py' or 'tenax run -m MODULE'
$ --tee 3
no script given; write 'tenax run train.py' or 'tenax run -m MODULE'
$ --nproc 4 train.py
unknown flag '--nproc' (flags cannot be abbreviated); did you mean '--nproc-per-node'?
$ --nproc_per_nodes 4 train.py
unknown flag '--nproc_per_nodes'; did you mean '--nproc-per-node'?
$ --max-restart=1 train.py
unknown flag '--max-restart' (flags cannot be abbreviated); did you mean '--max-restarts'?
$ --lr 0.1 train.py
unknown flag '--lr'; flags of your script go after the script's name
$ -x train.py
unknown flag '-x'; flags of your script go after the script's name
$ -np 4 train.py
unknown flag '-np'; use '--nproc-per-node N'
$ --use_env train.py
unknown flag '--use_env'; remove it: workers always get their rank in the environment
$ --log-dir --tee 3 train.py
--log-dir needs a value, but '--tee' follows; if that is the value, write '--log-dir=--tee'
$ --log_dir
--log_dir needs a value: --log_dir DIR
$ --standalone=1 train.py
--standalone takes no value, but '--standalone=1' has one
$ -mtrain
-m takes no value, but '-mtrain' has one
$ --max-restarts three train.py
--max-restarts takes a whole number, at least 0, not 'three'
$ --max_restarts -1 train.py
--max_restarts takes a whole number, at least 0, not '-1'
$ --master-port 70000 train.py
--master-port takes a whole number from 0 to 65535, not '70000'
$ --monitor-interval 0 train.py
--monitor-interval takes a number of seconds, more than 0, not '0'
$ --monitor-interval nan train.py
--monitor-interval takes a number of seconds, more than 0, not 'nan'
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
--monitor-interval takes at most 10000000000 s, not '1e300'
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
-m and --no-python cannot be combined; remove one of them
$ --run-path --module train
--module and --run-path cannot be combined; remove one of them
$ --run_path --no_python train
--no_python and --run_path cannot be combined; remove one of them
$ --standalone --nnodes 2 train.py
--standalone and --nnodes 2 cannot be combined; remove one of them
$ --standalone --rdzv-endpoint head:29400 train.py
--standalone and --rdzv-endpoint head:29400 cannot be combined: the endpoint is another host; remove one of them
$ --standalone --rdzv-backend etcd train.py
--standalone and --rdzv-backend etcd cannot be combined: one node needs no rendezvous; remove one of them
$ --node-rank 1 train.py
--node-rank 1 is out of range: the job has one node, with rank 0; remove it
$ --rdzv-backend c10d --master-addr head train.py
--master-addr head and --rdzv-backend c10d cannot be combined: --master-addr is for the static backend; remove one of \
them
$ --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --master_port 29501 train.py
--master_port 29501 and --rdzv-backend c10d cannot be combined: --master_port is for the static backend; remove one \
of them
$ --rdzv-endpoint a:1 --master-port 2 train.py
--rdzv-endpoint a:1 and --master-port 2 are different addresses; remove one of them
$ --rdzv-endpoint host:port train.py
--rdzv-endpoint takes HOST or HOST:PORT with a port below 65536, not 'host:port'
$ --rdzv-backend c10d --rdzv-endpoint localhost:99999 train.py
--rdzv-endpoint takes HOST or HOST:PORT with a port below 65536, not 'localhost:99999'
$ --rdzv-backend= train.py
--rdzv-backend needs a name, such as 'c10d' or 'static'
$ --rdzv-conf timeout train.py
--rdzv-conf takes 'key=value,key=value', not 'timeout'
$ --rdzv-conf a=1,,b=2 train.py
--rdzv-conf takes 'key=value,key=value', not ''
$ --rdzv-conf token=abc,def train.py
--rdzv-conf takes 'key=value,key=value'; a part is not
$ --rdzv-conf token=abc train.py
every user of this host can read the token of --rdzv-conf in the process list; write it to a file that only you can \
read and pass '--rdzv-conf token_file=FILE', or set the variable TENAX_RDZV_TOKEN
$ --rdzv-conf endpoint=head train.py
'endpoint' cannot be set in --rdzv-conf; it has its own flag
$ -r 4 train.py
-r takes 0 (none), 1 (stdout), 2 (stderr), 3 (both), or a map of local ranks such as '0:1,1:3', not '4'
$ --tee 0:1;1:2 train.py
--tee takes 0 (none), 1 (stdout), 2 (stderr), 3 (both), or a map of local ranks such as '0:1,1:3', not '0:1;1:2'
$ --nproc-per-node 2 --tee 0:1,2:3 train.py
--tee 0:1,2:3: local rank 2 is out of range; there are 2 workers, 0 to 1
$ --redirects 1:3 train.py
--redirects 1:3: local rank 1 is out of range; there is one worker, local rank 0
$ --local-ranks-filter 0,1 train.py
--local-ranks-filter 0,1: local rank 1 is out of range; there is one worker, local rank 0
$ --local-ranks-filter 0; train.py
--local-ranks-filter takes local ranks such as '0' or '0,1,2', not '0;'
$ --signals-to-handle SIGFOO train.py
--signals-to-handle: unknown signal 'SIGFOO'; use names such as SIGTERM,SIGINT,SIGHUP,SIGQUIT
$ --signals-to-handle SIGTERM,SIGKILL train.py
--signals-to-handle: SIGKILL cannot be caught; remove it
$ --notice-signals SIGFOO train.py
--notice-signals: unknown signal 'SIGFOO'; use names such as SIGTERM,SIGINT,SIGHUP,SIGQUIT
$ --notice-signals SIGUSR1,SIGTERM train.py
SIGTERM is in --notice-signals and in --signals-to-handle; a signal either announces preemption or stops the job, so \
remove it from one of them
$ --signals-to-handle SIGTERM,SIGUSR1 --notice_signals SIGUSR1 train.py
SIGUSR1 is in --notice_signals and in --signals-to-handle; a signal either announces preemption or stops the job, so \
remove it from one of them
$ --rdzv-backend mine --notice-signals SIGUSR1 train.py
--notice-signals SIGUSR1 and --rdzv-backend mine cannot be combined: only tenax's own backends send notices to other \
nodes; remove one of them
$ --notice-seconds 0 train.py
--notice-seconds takes a number of seconds, more than 0, not '0'
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
--shutdown-timeout takes a whole number of seconds, at least 0, not '-5'
$ PET_STANDALONE=maybe train.py
PET_STANDALONE takes 0, 1, true, false, yes or no, not 'maybe'
$ PET_MAX_RESTARTS=many train.py
PET_MAX_RESTARTS takes a whole number, at least 0, not 'many'
$ PET_START_METHOD=thread train.py
PET_START_METHOD takes spawn, fork or forkserver, not 'thread'
$ PET_STANDALONE=1 PET_NNODES=4 train.py
PET_STANDALONE=1 and PET_NNODES=4 cannot be combined; remove one of them
$ PET_NO_PYTHON=1 -m train
-m and PET_NO_PYTHON=1 cannot be combined; remove one of them
$ PET_NODE_RANK=3 train.py
PET_NODE_RANK=3 is out of range: the job has one node, with rank 0; remove it
$ PET_TEE=5:3 train.py
PET_TEE=5:3: local rank 5 is out of range; there is one worker, local rank 0
$ TORCH_ELASTIC_SHUTDOWN_TIMEOUT=soon train.py
TORCH_ELASTIC_SHUTDOWN_TIMEOUT takes a whole number of seconds, at least 0, not 'soon'
$ TORCH_ELASTIC_SHUTDOWN_TIMEOUT=-1 train.py
TORCH_ELASTIC_SHUTDOWN_TIMEOUT takes a whole number of seconds, at least 0, not '-1'
"""

NOTES = """
$ --monitor-interval 0.2 train.py
--monitor-interval 0.2 has no effect: tenax does not poll its workers
$ --start-method fork train.py
--start-method fork has no effect without --run-path
$ --rdzv-backend c10d --rdzv-conf jion_timeout=9,timeout=3,foo=1 train.py
ignoring unknown --rdzv-conf key 'jion_timeout'; did you mean 'join_timeout'?
ignoring unknown --rdzv-conf key 'foo'
$ --fatal-exit-codes 3 train.py
--fatal-exit-codes 3 has no effect without --max-restarts
$ --notice-seconds 60 train.py
--notice-seconds 60 has no effect without --notice-signals
$ --duplicate-stdout-filters loss -r 3 train.py
--duplicate-stdout-filters has no effect without --tee 1: only teed lines are copied
$ --duplicate_stderr_filters error train.py
--duplicate_stderr_filters has no effect without --tee 2: only teed lines are copied
$ --rdzv-backend etcd --rdzv-endpoint store:2379 train.py
--rdzv-backend etcd is not used: one node needs no rendezvous
$ train.py --nproc-per-node=4
'--nproc-per-node=4' is after the script, so it is passed to the script
$ PET_NNODES=4 PET_NODE_RANK=2 PET_MASTER_ADDR=head PET_MASTER_PORT=29500 --standalone train.py
PET_NNODES=4 is ignored because of --standalone
PET_NODE_RANK=2 is ignored because of --standalone
PET_MASTER_ADDR=head is ignored because of --standalone
PET_MASTER_PORT=29500 is ignored because of --standalone
$ PET_NODE_RANK=2 PET_MASTER_ADDR=head --nnodes 1 train.py
PET_NODE_RANK=2 is ignored because of --nnodes 1
PET_MASTER_ADDR=head is ignored because of --nnodes 1
$ PET_RDZV_ENDPOINT=head:29400 PET_RDZV_BACKEND=etcd --standalone train.py
PET_RDZV_ENDPOINT=head:29400 is ignored because of --standalone
PET_RDZV_BACKEND=etcd is ignored because of --standalone
$ PET_RDZV_BACKEND=c10d --master-port 29501 train.py
PET_RDZV_BACKEND=c10d is ignored because of --master-port 29501
$ PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=head:29400 --master-port 29501 train.py
PET_RDZV_BACKEND=c10d is ignored because of --master-port 29501
PET_RDZV_ENDPOINT=head:29400 is ignored because of --master-port 29501
$ PET_RDZV_ENDPOINT=head:29400 --master-addr localhost train.py
PET_RDZV_ENDPOINT=head:29400 is ignored because of --master-addr localhost
$ PET_MASTER_ADDR=head PET_RDZV_BACKEND=c10d train.py
PET_MASTER_ADDR=head is ignored because of PET_RDZV_BACKEND=c10d
"""

# Accepted without notes, with the backend and endpoint of the launch.
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


@pytest.mark.parametrize(("args", "expected"), cases(REFUSALS))
def test_an_invalid_command_line_is_rejected_with_this_message(args, expected) -> None:
    with pytest.raises(UsageError) as error:
        parse_line(args)
    assert [str(error.value)] == expected


@pytest.mark.parametrize(("args", "expected"), cases(NOTES))
def test_a_note_is_printed(args, expected) -> None:
    """For flags that have no effect or that the command line overrides; the job runs."""
    assert list(parse_line(args).notes) == expected


@pytest.mark.parametrize(("args", "expected"), cases(ACCEPTED))
def test_a_valid_command_line_is_accepted_without_notes(args, expected) -> None:
    """torchrun's command lines for one node work unchanged."""
    options = parse_line(args)
    assert options.notes == ()
    assert [f"{options.rdzv_backend} {options.rdzv_endpoint or '-'}"] == expected


def test_a_standalone_node_ignores_the_master_of_the_cluster() -> None:
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
def test_a_role_that_other_nodes_would_reject_is_rejected(role: str, problem: str) -> None:
    """With the reason, before another node closes the connection."""
    with pytest.raises(UsageError, match=problem):
        parse(["--role", role, "train.py"], {})
