"""Command lines of several nodes: endpoint, node rank, which are rejected and which get a note."""

from __future__ import annotations

import pytest
from command_lines import cases, parse_line

from tenax._core.model import Evidence, Failure
from tenax._core.policy import GiveUp, History, Restart
from tenax.cli.arguments import parse
from tenax.cli.flags import UsageError
from tenax.cli.host_checks import check_host
from tenax.cli.run import launch_arguments

REFUSALS = """
$ --nnodes 2 train.py
--nnodes 2 needs an endpoint; add '--rdzv-endpoint HOST' with the host of one node, the same on all nodes, or use \
--standalone to run on this node alone
$ --nnodes 2 --node-rank 0 train.py
--nnodes 2 needs an endpoint; add '--rdzv-endpoint HOST' with the host of one node, the same on all nodes, or use \
--standalone to run on this node alone
$ PET_NNODES=1:4 PET_NODE_RANK=2 train.py
PET_NNODES=1:4 needs an endpoint; add '--rdzv-endpoint HOST' with the host of one node, the same on all nodes, or use \
--standalone to run on this node alone
$ --nnodes 2 --node-rank 1 --master-port 29500 train.py
--master-port 29500 needs a host; add '--master-addr HOST' of one of the nodes
$ --nnodes 2 --rdzv-endpoint 0.0.0.0:29400 train.py
--rdzv-endpoint 0.0.0.0:29400 is not the address of one host, so every node would serve its own job; use an address \
at which the other nodes reach one of them
$ --nnodes 2 --rdzv-endpoint [::]:29400 train.py
--rdzv-endpoint [::]:29400 is not the address of one host, so every node would serve its own job; use an address at \
which the other nodes reach one of them
$ --nnodes 2 --rdzv-endpoint * train.py
--rdzv-endpoint * is not the address of one host, so every node would serve its own job; use an address at which the \
other nodes reach one of them
$ --nnodes 2 --node-rank 0 --master-addr 0.0.0.0 train.py
--master-addr 0.0.0.0 is not the address of one host, so every node would serve its own job; use an address at which \
the other nodes reach one of them
$ --nnodes 2 --rdzv-endpoint head:0 train.py
--rdzv-endpoint head:0: other nodes cannot connect to port 0; set another, such as 29400
$ --nnodes 2 --node-rank 0 --master-addr head --master-port 0 train.py
--master-port 0: other nodes cannot connect to port 0; set another, such as 29400
$ --nnodes 2 --rdzv-endpoint :29400 train.py
--rdzv-endpoint takes HOST or HOST:PORT with a port below 65536, not ':29400'
$ --nnodes 2 --rdzv-endpoint head:29400:1 train.py
--rdzv-endpoint takes HOST or HOST:PORT with a port below 65536, not 'head:29400:1'
$ --nnodes 2 --rdzv-endpoint head:99999 train.py
--rdzv-endpoint takes HOST or HOST:PORT with a port below 65536, not 'head:99999'
$ --nnodes 2 --node-rank 0 --master-addr head:29500 train.py
--master-addr takes a host, without the port (--master-port), not 'head:29500'
$ --nnodes 2 --rdzv-endpoint a:1 --master-addr b train.py
--rdzv-endpoint a:1 and --master-addr b are different addresses; remove one of them
$ --nnodes 2 --rdzv-backend etcd-v2 train.py
--rdzv-backend etcd-v2 needs the addresses of etcd; add '--rdzv-endpoint HOST:PORT,HOST:PORT' with its members, the \
same on all nodes
$ --nnodes 2 --rdzv-backend etcd --rdzv-endpoint store:2379 --master-addr head train.py
--master-addr head and --rdzv-backend etcd cannot be combined; set the etcd members with --rdzv-endpoint and remove \
--master-addr
$ --nnodes 2 --rdzv-backend local --rdzv-endpoint head train.py
--rdzv-backend local and --nnodes 2 cannot be combined: local is for one node; remove one of them
$ --nnodes 2 --rdzv-backend= --rdzv-endpoint head train.py
--rdzv-backend needs a name, such as 'tcp' or 'static'
$ --nnodes 2 --rdzv-backend c10d --rdzv-conf store_type=file --rdzv-endpoint /shared/meeting train.py
store_type=file is not supported for several nodes; remove it from --rdzv-conf and set '--rdzv-endpoint HOST'
$ --nnodes 1:2 --rdzv-backend static --node-rank 0 --master-addr head train.py
--rdzv-backend static and --nnodes 1:2 cannot be combined: static needs a fixed number of nodes; use '--rdzv-backend \
tcp'
$ --nnodes 2 --rdzv-backend static --master-addr head train.py
--rdzv-backend static needs the rank of each node; add --node-rank, or use '--rdzv-backend tcp', which assigns ranks
$ --nnodes 2 --node-rank 2 --master-addr head train.py
--node-rank 2 is out of range: the 2 nodes have the ranks 0 and 1
$ PET_NNODES=3 PET_NODE_RANK=3 PET_MASTER_ADDR=head train.py
PET_NODE_RANK=3 is out of range: the 3 nodes have the ranks 0 to 2
$ --nnodes 1:4 --node-rank 0 --rdzv-endpoint head train.py
--node-rank 0 and --nnodes 1:4 cannot be combined: ranks change when nodes join and leave; use --rdzv-conf \
node_order=..., or remove it
$ --nnodes 1:4 --rdzv-endpoint head --rdzv-conf rank=1 train.py
rank=1 in --rdzv-conf and --nnodes 1:4 cannot be combined: ranks change when nodes join and leave; use --rdzv-conf \
node_order=..., or remove it
$ --nnodes 2 --rdzv-endpoint head --rdzv-conf rank=first train.py
rank in --rdzv-conf takes a whole number, at least 0, not 'first'
$ --nnodes 3 --node-rank 2 --rdzv-endpoint head --rdzv-conf rank=1 train.py
--node-rank 2 and rank=1 in --rdzv-conf are different ranks; remove one of them
$ --nnodes 2 --node-rank 1 --rdzv-endpoint head --rdzv-conf node_order=rack-3 train.py
--node-rank 1 and node_order=rack-3 cannot be combined: one sets the rank of this node, the other its position; \
remove one of them
$ --nnodes 2 --rdzv-backend mine --node-rank 1 train.py
--node-rank 1 and --rdzv-backend mine cannot be combined: --node-rank is for tenax's own backends; remove one of them
$ --nnodes 2 --rdzv-backend mine --report report.json train.py
--report report.json and --rdzv-backend mine cannot be combined: --report is for tenax's own backends; remove one of \
them
$ --nnodes 2 --rdzv-backend mine --on-hang restart train.py
--on-hang restart and --rdzv-backend mine cannot be combined: --on-hang is for tenax's own backends; remove one of them
$ --nnodes 2 --rdzv-backend mine --master-addr head train.py
--master-addr head and --rdzv-backend mine cannot be combined: --master-addr is for the static backend; remove one of \
them
$ --nnodes 2 --rdzv-endpoint head --rdzv-conf run_id=x train.py
'run_id' cannot be set in --rdzv-conf; it has its own flag
$ --nnodes 2 --rdzv-backend etcd --rdzv-endpoint store --rdzv-conf user=me,password=x train.py
every user of this host can read the password of --rdzv-conf in the process list; write it to a file that only you \
can read and pass '--rdzv-conf password_file=FILE', or set the variable TENAX_ETCD_PASSWORD
"""

NOTES = """
$ PET_NNODES=1:4 PET_NODE_RANK=2 PET_MASTER_ADDR=head PET_MASTER_PORT=29500 train.py
PET_NODE_RANK=2 only sets the order of the nodes, because of PET_NNODES=1:4
$ PET_NODE_RANK=2 --nnodes 1:4 --rdzv-endpoint head --rdzv-conf node_order=rack-1 train.py
PET_NODE_RANK=2 is ignored because of node_order=rack-1
$ TENAX_NODE_ORDER=7 PET_NODE_RANK=2 --nnodes 4 --rdzv-endpoint head train.py
PET_NODE_RANK=2 is ignored because of node_order=7
$ PET_NODE_RANK=6 --nnodes 2 --rdzv-endpoint head train.py
PET_NODE_RANK=6 is ignored because of --nnodes 2
$ PET_MASTER_ADDR=other PET_MASTER_PORT=29500 --nnodes 2 --rdzv-endpoint head train.py
PET_MASTER_ADDR=other is ignored because of --rdzv-endpoint head
PET_MASTER_PORT=29500 is ignored because of --rdzv-endpoint head
$ PET_RDZV_ENDPOINT=other --nnodes 2 --master-addr head train.py
PET_RDZV_ENDPOINT=other is ignored because of --master-addr head
$ PET_RDZV_BACKEND=etcd --nnodes 2 --node-rank 0 --master-addr head train.py
PET_RDZV_BACKEND=etcd is ignored because of --master-addr head
$ PET_NODE_RANK=1 PET_MASTER_ADDR=head --nnodes 2 --rdzv-backend mine train.py
PET_MASTER_ADDR=head is ignored because of --rdzv-backend mine
PET_NODE_RANK=1 is ignored because of --rdzv-backend mine
$ PET_STANDALONE=1 --nnodes 2 --rdzv-endpoint head train.py
PET_STANDALONE=1 is ignored because of --nnodes 2
$ --nnodes 2 --rdzv-backend etcd --rdzv-endpoint store --rdzv-conf is_host=1 train.py
is_host in --rdzv-conf has no effect: the elected node serves the coordinator
$ PET_MASTER_ADDR=head --nnodes 2 --rdzv-backend etcd --rdzv-endpoint store train.py
PET_MASTER_ADDR=head is ignored because of --rdzv-backend etcd
$ --nnodes 2 --rdzv-endpoint head --rdzv-conf is_host=1 train.py
is_host in --rdzv-conf has no effect: the node that can listen at head serves the coordinator
$ --nnodes 2 --rdzv-endpoint head --rdzv-conf tokn=x train.py
ignoring unknown --rdzv-conf key 'tokn'; did you mean 'token'?
"""

# Accepted without notes, with backend, endpoint and settings of the rendezvous.
ACCEPTED = """
$ --nnodes 2 --node-rank 0 --master-addr h0 --master-port 29500 train.py
static h0:29500 rank=0
$ --nnodes=2 --nproc_per_node=4 --node_rank=1 --master_addr=10.0.0.1 --master_port=1234 train.py
static 10.0.0.1:1234 rank=1
$ --nnodes 2 --node-rank 1 --master-addr h0 train.py
static h0:29500 rank=1
$ --nnodes 2 --node-rank 1 --rdzv-backend static --rdzv-endpoint h0:7 train.py
static h0:7 rank=1
$ --nnodes 2 --node-rank 1 --master-addr fe80::1 train.py
static [fe80::1]:29500 rank=1
$ --nnodes 2 --master-addr h0 --master-port 29500 train.py
tcp h0:29500
$ --nnodes 2 --rdzv-endpoint h0 train.py
tcp h0
$ --nnodes 2:4 --rdzv-endpoint h0 train.py
tcp h0
$ --nnodes 1:4 --master-addr h0 --master-port 29500 train.py
tcp h0:29500
$ --nnodes=1:4 --rdzv-backend=c10d --rdzv-endpoint=h0:29400 --rdzv-id=job train.py
c10d h0:29400
$ --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=[fe80::1]:29400 --node-rank 1 train.py
c10d [fe80::1]:29400 rank=1
$ --nnodes=2 --rdzv-backend=c10d --master-addr h0 --master-port 29500 train.py
c10d h0:29500
$ --nnodes 2 --rdzv-endpoint h0:7 --master-addr h0 --master-port 7 train.py
tcp h0:7
$ --nnodes 2 --rdzv-backend tcp --rdzv-endpoint h0 --rdzv-conf node_order=3,scale_up=restart train.py
tcp h0 node_order=3 scale_up=restart
$ --nnodes 2 --rdzv-endpoint h0 --rdzv-conf rank=1 train.py
static h0 rank=1
$ --nnodes 2 --rdzv-backend etcd --rdzv-endpoint e0:2379,e1:2379,e2:2379 train.py
etcd e0:2379,e1:2379,e2:2379
$ --nnodes 2 --node-rank 1 --rdzv-backend etcd-v2 --rdzv-endpoint https://e0:2379 --rdzv-conf user=me train.py
etcd-v2 https://e0:2379 user=me rank=1
$ PET_RDZV_BACKEND=etcd --nnodes 2:4 --rdzv-endpoint store:2379 train.py
etcd store:2379
$ --nnodes 2 --rdzv-backend mine train.py
mine -
$ --nnodes 2:3 --rdzv-backend mine --rdzv-endpoint anything:at,all --rdzv-conf x=1 train.py
mine anything:at,all x=1
$ PET_NNODES=2 PET_NODE_RANK=1 PET_MASTER_ADDR=pod-0.job PET_MASTER_PORT=29500 PET_NPROC_PER_NODE=2 train.py
static pod-0.job:29500 rank=1
$ PET_NNODES=1:4 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=pod-0:23456 PET_RDZV_ID=job train.py
c10d pod-0:23456
$ PET_RDZV_BACKEND=static PET_RDZV_ENDPOINT=h0 PET_NNODES=2:4 train.py
tcp h0
$ PET_RDZV_CONF=token=abc --nnodes 2 --rdzv-endpoint h0 train.py
tcp h0 token=abc
"""


@pytest.mark.parametrize(("args", "expected"), cases(REFUSALS))
def test_an_invalid_command_line_is_rejected_with_this_message(args, expected) -> None:
    with pytest.raises(UsageError) as error:
        parse_line(args)
    assert [str(error.value)] == expected


@pytest.mark.parametrize(("args", "expected"), cases(NOTES))
def test_a_note_is_printed(args, expected) -> None:
    assert list(parse_line(args).notes) == expected


@pytest.mark.parametrize(("args", "expected"), cases(ACCEPTED))
def test_a_valid_command_line_is_accepted_without_notes(args, expected) -> None:
    """torchrun's command lines for several nodes work unchanged, and so do shorter ones."""
    options = parse_line(args)
    settings = [f"{key}={value}" for key, value in options.rdzv_configs.items()]
    assert [" ".join([options.rdzv_backend, options.rdzv_endpoint or "-", *settings])] == expected
    assert options.notes == ()


def test_a_node_rank_of_the_environment_becomes_an_order_if_nodes_may_join_and_leave() -> None:
    """Which pods are members may change, but not their order."""
    options = parse(["--nnodes=1:4", "--rdzv-endpoint=h0", "t.py"], {"PET_NODE_RANK": "2"})
    assert options.rdzv_configs == {"node_order": "2"}
    assert options.rdzv_backend == "tcp"


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (["--nnodes=2", "--rdzv-endpoint=h0"], "none"),
        (["--nnodes=1:2", "--rdzv-endpoint=h0", "--rdzv-id=job"], "job"),
        ([], ""),
        (["--rdzv-id=none"], ""),
    ],
)
def test_the_default_run_id_is_none_for_several_nodes_and_random_for_one(args, name) -> None:
    """``none`` is torchrun's default. The random id is created at launch."""
    assert parse([*args, "t.py"], {}).run_id == name


def test_the_launch_config_has_all_settings(tmp_path) -> None:
    """Nodes, rendezvous settings, notices and fatal errors."""
    line = (
        "--nnodes 2:4 --rdzv-endpoint h0:7 --rdzv-conf join_timeout=9 --max-restarts 3 --fatal-exit-codes 3,64,3 "
        "--fatal-errors ConfigError --notice-signals SIGUSR1 --notice-seconds 60 train.py"
    )
    config, _, _ = launch_arguments(parse(line.split(), {}), "python")
    assert (config.min_nodes, config.max_nodes, config.run_id) == (2, 4, "none")
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("tcp", "h0:7")
    assert config.rdzv_configs["join_timeout"] == "9"
    assert (config.notice_signals, config.notice_s) == ("SIGUSR1", 60)
    policy = config.restart_policy
    for failure, answer in (
        (_failure(3), GiveUp),
        (_failure(64), GiveUp),
        (_failure(1, "ConfigError"), GiveUp),
        (_failure(1, "ValueError"), Restart),
    ):
        assert isinstance(policy.decide(failure, History(restarts_used=0, max_restarts=3)), answer)


def _failure(exit_code: int, error: str = "") -> Failure:
    return Failure(1, 0, 0, 100, exit_code, 0.0, evidence=Evidence(error_type=error))


def test_no_restart_policy_is_set_without_fatal_errors() -> None:
    config, _, _ = launch_arguments(parse(["train.py"], {}), "python")
    assert (config.restart_policy, config.notice_signals, config.notice_s) == (None, "", None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("scale_up=later", "the rendezvous option 'scale_up' is 'later'; expected 'now' or 'restart'"),
        ("join_timeout=soon", "the rendezvous option 'join_timeout' is 'soon'; expected a positive number"),
        ("last_call_timeout=-1", "the rendezvous option 'last_call_timeout' is '-1'; expected a positive number"),
        ("use_agent_store=maybe", "the rendezvous option 'use_agent_store' is 'maybe'; expected yes or no"),
        ("store_port=http", "the rendezvous option 'store_port' is 'http'; expected a whole number"),
        ("token_file=gone", "cannot read the file of the rendezvous option 'token_file': "),
        ("ca_cert=gone", "could not load the TLS files (gone): "),
    ],
)
def test_an_invalid_setting_is_rejected_before_the_start(settings, message, tmp_path, monkeypatch) -> None:
    """With the engine's own message, as a usage error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    options = parse(["--nnodes=2", "--rdzv-endpoint=h0", f"--rdzv-conf={settings}", "t.py"], {})
    with pytest.raises(UsageError) as error:
        check_host(options, {}, str(tmp_path))
    assert str(error.value).startswith(message)


def test_two_secrets_are_rejected(tmp_path) -> None:
    (tmp_path / "t.py").touch()
    environ = {"PET_RDZV_CONF": "token=a,token_file=b"}
    with pytest.raises(UsageError, match="both rendezvous options 'token' and 'token_file' are given; give only one"):
        check_host(parse(["--nnodes=2", "--rdzv-endpoint=h0", "t.py"], environ), {}, str(tmp_path))


def test_a_setting_for_one_node_is_checked_too(tmp_path) -> None:
    (tmp_path / "t.py").touch()
    with pytest.raises(UsageError, match="'use_agent_store' is 'maybe'; expected yes or no"):
        check_host(parse(["--rdzv-conf=use_agent_store=maybe", "t.py"], {}), {}, str(tmp_path))


def test_an_unknown_backend_is_rejected_with_the_installed_ones(tmp_path) -> None:
    """Only those for several nodes are listed."""
    (tmp_path / "t.py").touch()
    with pytest.raises(
        UsageError, match=r"^unknown --rdzv-backend 'mine'; installed backends: c10d, etcd, etcd-v2, static, tcp$"
    ):
        check_host(parse(["--nnodes=2", "--rdzv-backend=mine", "t.py"], {}), {}, str(tmp_path))


def test_checking_valid_settings_opens_no_connection_and_writes_no_file(tmp_path) -> None:
    """The secret is read, but no host is resolved: it need not exist."""
    (tmp_path / "t.py").touch()
    secret = tmp_path / "secret"
    secret.write_text("a secret of tests\n")
    secret.chmod(0o600)
    args = ["--nnodes=1:3", "--rdzv-endpoint=no-such-host.invalid", f"--rdzv-conf=token_file={secret},join_timeout=3"]
    check_host(parse([*args, "t.py"], {}), {}, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "t.py"]
