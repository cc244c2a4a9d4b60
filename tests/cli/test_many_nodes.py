"""Several nodes on the command line: where they meet, as which node, what is refused, and what is only noted."""

from __future__ import annotations

import pytest
from typed_lines import ask, cases

from tenax._core.model import Evidence, Failure
from tenax._core.policy import GiveUp, History, Restart
from tenax.cli.arguments import parse
from tenax.cli.flags import UsageError
from tenax.cli.host_checks import check_host
from tenax.cli.run import launch_arguments

REFUSALS = """
$ --nnodes 2 train.py
--nnodes 2 asks for several nodes, and they need a place to meet: add '--rdzv-endpoint HOST', one of them and the same \
on all, or run on this machine alone with --standalone
$ --nnodes 2 --node-rank 0 train.py
--nnodes 2 asks for several nodes, and they need a place to meet: add '--rdzv-endpoint HOST', one of them and the same \
on all, or run on this machine alone with --standalone
$ PET_NNODES=1:4 PET_NODE_RANK=2 train.py
PET_NNODES=1:4 asks for several nodes, and they need a place to meet: add '--rdzv-endpoint HOST', one of them and the \
same on all, or run on this machine alone with --standalone
$ --nnodes 2 --node-rank 1 --master-port 29500 train.py
--master-port 29500 names the port, but not the machine where the nodes meet: add --master-addr HOST, of one of them
$ --nnodes 2 --rdzv-endpoint 0.0.0.0:29400 train.py
--rdzv-endpoint 0.0.0.0:29400 is an address of every machine, so that each node would serve it and be alone; name one \
of them, as the others reach it
$ --nnodes 2 --rdzv-endpoint [::]:29400 train.py
--rdzv-endpoint [::]:29400 is an address of every machine, so that each node would serve it and be alone; name one of \
them, as the others reach it
$ --nnodes 2 --rdzv-endpoint * train.py
--rdzv-endpoint * is an address of every machine, so that each node would serve it and be alone; name one of them, as \
the others reach it
$ --nnodes 2 --node-rank 0 --master-addr 0.0.0.0 train.py
--master-addr 0.0.0.0 is an address of every machine, so that each node would serve it and be alone; name one of them, \
as the others reach it
$ --nnodes 2 --rdzv-endpoint head:0 train.py
--rdzv-endpoint head:0 leaves the port open, so that nobody could find it; name one, such as 29400
$ --nnodes 2 --node-rank 0 --master-addr head --master-port 0 train.py
--master-port 0 leaves the port open, so that nobody could find it; name one, such as 29400
$ --nnodes 2 --rdzv-endpoint :29400 train.py
--rdzv-endpoint takes HOST or HOST:PORT with a port below 65536, not ':29400'
$ --nnodes 2 --rdzv-endpoint head:29400:1 train.py
--rdzv-endpoint takes HOST or HOST:PORT with a port below 65536, not 'head:29400:1'
$ --nnodes 2 --rdzv-endpoint head:99999 train.py
--rdzv-endpoint takes HOST or HOST:PORT with a port below 65536, not 'head:99999'
$ --nnodes 2 --node-rank 0 --master-addr head:29500 train.py
--master-addr takes a host, with its port in --master-port, not 'head:29500'
$ --nnodes 2 --rdzv-endpoint a:1 --master-addr b train.py
--rdzv-endpoint a:1 and --master-addr b name two different meeting places; drop one of them
$ --nnodes 2 --rdzv-backend etcd-v2 train.py
--rdzv-backend etcd-v2 needs to know where etcd is: add '--rdzv-endpoint HOST:PORT,HOST:PORT', its members and the \
same on all nodes
$ --nnodes 2 --rdzv-backend etcd --rdzv-endpoint store:2379 --master-addr head train.py
--master-addr head names a place that a node serves, but with --rdzv-backend etcd nodes meet at etcd; name its members \
with --rdzv-endpoint, and drop that
$ --nnodes 2 --rdzv-backend local --rdzv-endpoint head train.py
--rdzv-backend local is for one node, but --nnodes 2 asks for several
$ --nnodes 2 --rdzv-backend= --rdzv-endpoint head train.py
--rdzv-backend needs a name, such as 'tcp' or 'static'
$ --nnodes 2 --rdzv-backend c10d --rdzv-conf store_type=file --rdzv-endpoint /shared/meeting train.py
several nodes cannot meet in a file in this release; drop store_type from --rdzv-conf and name a host with \
--rdzv-endpoint
$ --nnodes 1:2 --rdzv-backend static --node-rank 0 --master-addr head train.py
--rdzv-backend static needs a fixed number of nodes, but --nnodes 1:2 lets them come and go; use '--rdzv-backend tcp'
$ --nnodes 2 --rdzv-backend static --master-addr head train.py
--rdzv-backend static needs the number of each node: add --node-rank, or use '--rdzv-backend tcp', which numbers them \
itself
$ --nnodes 2 --node-rank 2 --master-addr head train.py
--node-rank 2 is not a node of this job, whose 2 nodes have the numbers 0 and 1
$ PET_NNODES=3 PET_NODE_RANK=3 PET_MASTER_ADDR=head train.py
PET_NODE_RANK=3 is not a node of this job, whose 3 nodes have the numbers 0 to 2
$ --nnodes 1:4 --node-rank 0 --rdzv-endpoint head train.py
--node-rank 0 cannot be fixed where nodes come and go (--nnodes 1:4); order them with --rdzv-conf node_order=..., or \
leave it out
$ --nnodes 1:4 --rdzv-endpoint head --rdzv-conf rank=1 train.py
rank=1 in --rdzv-conf cannot be fixed where nodes come and go (--nnodes 1:4); order them with \
--rdzv-conf node_order=..., or leave it out
$ --nnodes 2 --rdzv-endpoint head --rdzv-conf rank=first train.py
rank in --rdzv-conf takes a whole number of at least 0, not 'first'
$ --nnodes 3 --node-rank 2 --rdzv-endpoint head --rdzv-conf rank=1 train.py
--node-rank 2 and rank=1 in --rdzv-conf name two different nodes; drop one of them
$ --nnodes 2 --node-rank 1 --rdzv-endpoint head --rdzv-conf node_order=rack-3 train.py
--node-rank 1 fixes the number of this node, but node_order=rack-3 orders it among the others; drop one of them
$ --nnodes 2 --rdzv-backend mine --node-rank 1 train.py
--node-rank 1 is for a rendezvous of tenax, but --rdzv-backend mine names another; drop one of them
$ --nnodes 2 --rdzv-backend mine --master-addr head train.py
--master-addr head is for the static rendezvous, but --rdzv-backend mine names another; drop one of them
$ --nnodes 2 --rdzv-endpoint head --rdzv-conf run_id=x train.py
--rdzv-conf sets 'run_id', which is no setting of a backend; it has a flag of its own
$ --nnodes 2 --rdzv-backend etcd --rdzv-endpoint store --rdzv-conf user=me,password=x train.py
every user of this host can read the password of --rdzv-conf in the process list; write it to a file that only you can \
read and pass '--rdzv-conf password_file=FILE', or set the variable TENAX_ETCD_PASSWORD
"""

NOTES = """
$ PET_NNODES=1:4 PET_NODE_RANK=2 PET_MASTER_ADDR=head PET_MASTER_PORT=29500 train.py
PET_NODE_RANK=2 only orders the nodes, because their number may change (PET_NNODES=1:4)
$ PET_NODE_RANK=2 --nnodes 1:4 --rdzv-endpoint head --rdzv-conf node_order=rack-1 train.py
PET_NODE_RANK=2 is not used, because of node_order=rack-1
$ TENAX_NODE_ORDER=7 PET_NODE_RANK=2 --nnodes 4 --rdzv-endpoint head train.py
PET_NODE_RANK=2 is not used, because of node_order=7
$ PET_NODE_RANK=6 --nnodes 2 --rdzv-endpoint head train.py
PET_NODE_RANK=6 is not used, because of --nnodes 2
$ PET_MASTER_ADDR=other PET_MASTER_PORT=29500 --nnodes 2 --rdzv-endpoint head train.py
PET_MASTER_ADDR=other is not used, because of --rdzv-endpoint head
PET_MASTER_PORT=29500 is not used, because of --rdzv-endpoint head
$ PET_RDZV_ENDPOINT=other --nnodes 2 --master-addr head train.py
PET_RDZV_ENDPOINT=other is not used, because of --master-addr head
$ PET_RDZV_BACKEND=etcd --nnodes 2 --node-rank 0 --master-addr head train.py
PET_RDZV_BACKEND=etcd is not used, because of --master-addr head
$ PET_NODE_RANK=1 PET_MASTER_ADDR=head --nnodes 2 --rdzv-backend mine train.py
PET_MASTER_ADDR=head is not used, because of --rdzv-backend mine
PET_NODE_RANK=1 is not used, because of --rdzv-backend mine
$ PET_STANDALONE=1 --nnodes 2 --rdzv-endpoint head train.py
PET_STANDALONE=1 is not used, because of --nnodes 2
$ --nnodes 2 --rdzv-backend etcd --rdzv-endpoint store --rdzv-conf is_host=1 train.py
is_host in --rdzv-conf has no effect: whoever is elected leads
$ PET_MASTER_ADDR=head --nnodes 2 --rdzv-backend etcd --rdzv-endpoint store train.py
PET_MASTER_ADDR=head is not used, because of --rdzv-backend etcd
$ --nnodes 2 --rdzv-endpoint head --rdzv-conf is_host=1 train.py
is_host in --rdzv-conf has no effect: whoever can listen at head serves it
$ --nnodes 2 --rdzv-endpoint head --rdzv-conf tokn=x train.py
unknown --rdzv-conf key 'tokn', which has no effect
"""

# What works in silence, and what the rendezvous is then told: backend, endpoint, settings.
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


@pytest.mark.parametrize(("words", "expected"), cases(REFUSALS))
def test_refused_in_one_sentence(words, expected) -> None:
    """A job of several nodes that could not form is refused before anybody waits."""
    with pytest.raises(UsageError) as refusal:
        ask(words)
    assert [str(refusal.value)] == expected


@pytest.mark.parametrize(("words", "expected"), cases(NOTES))
def test_noted(words, expected) -> None:
    """What the user should know although the job can run."""
    assert list(ask(words).notes) == expected


@pytest.mark.parametrize(("words", "expected"), cases(ACCEPTED))
def test_accepted_in_silence(words, expected) -> None:
    """torchrun's lines for several nodes work as they stand, and so do shorter ones."""
    options = ask(words)
    settings = [f"{key}={value}" for key, value in options.rdzv_configs.items()]
    assert [" ".join([options.rdzv_backend, options.rdzv_endpoint or "-", *settings])] == expected
    assert options.notes == ()


def test_a_clusters_rank_becomes_an_order_where_nodes_come_and_go() -> None:
    """The cluster counts its pods; which of them are in may change, but not their order."""
    options = parse(["--nnodes=1:4", "--rdzv-endpoint=h0", "t.py"], {"PET_NODE_RANK": "2"})
    assert options.rdzv_configs == {"node_order": "2"}
    assert options.rdzv_backend == "tcp"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--nnodes=2", "--rdzv-endpoint=h0"], "none"),
        (["--nnodes=1:2", "--rdzv-endpoint=h0", "--rdzv-id=job"], "job"),
        ([], ""),
        (["--rdzv-id=none"], ""),
    ],
)
def test_nodes_must_agree_on_the_name_of_the_job(words, name) -> None:
    """Several nodes that name no job have torchrun's name for it; one node has a random one, made at launch."""
    assert parse([*words, "t.py"], {}).run_id == name


def test_all_of_it_reaches_the_launcher(tmp_path) -> None:
    """Nodes, settings, notices and what is fatal arrive in the launch config."""
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


def test_without_anything_fatal_the_launchers_own_policy_decides() -> None:
    """Nothing is made that was not asked for."""
    config, _, _ = launch_arguments(parse(["train.py"], {}), "python")
    assert (config.restart_policy, config.notice_signals, config.notice_s) == (None, "", None)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("scale_up=later", "the rendezvous option 'scale_up' is 'later'; expected 'now' or 'restart'"),
        ("join_timeout=soon", "the rendezvous option 'join_timeout' is 'soon'; expected a positive number"),
        ("last_call_timeout=-1", "the rendezvous option 'last_call_timeout' is '-1'; expected a positive number"),
        ("use_agent_store=maybe", "the rendezvous option 'use_agent_store' is 'maybe'; expected yes or no"),
        ("store_port=http", "the rendezvous option 'store_port' is 'http'; expected a whole number"),
        ("token_file=gone", "the file of the rendezvous option 'token_file' cannot be read: "),
        ("ca_cert=gone", "could not load the TLS files (gone): "),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(settings, sentence, tmp_path, monkeypatch) -> None:
    """The engine's own judgement, in its words, as a usage mistake."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    options = parse(["--nnodes=2", "--rdzv-endpoint=h0", f"--rdzv-conf={settings}", "t.py"], {})
    with pytest.raises(UsageError) as refusal:
        check_host(options, str(tmp_path), {})
    assert str(refusal.value).startswith(sentence)


def test_two_secrets_are_refused(tmp_path) -> None:
    """Which of them is meant cannot be known."""
    (tmp_path / "t.py").touch()
    environ = {"PET_RDZV_CONF": "token=a,token_file=b"}
    with pytest.raises(UsageError, match="both rendezvous options 'token' and 'token_file' are given; expected one"):
        check_host(parse(["--nnodes=2", "--rdzv-endpoint=h0", "t.py"], environ), str(tmp_path), {})


def test_a_setting_that_one_node_reads_is_checked_too(tmp_path) -> None:
    """use_agent_store matters to one node as well."""
    (tmp_path / "t.py").touch()
    with pytest.raises(UsageError, match="'use_agent_store' is 'maybe'; expected yes or no"):
        check_host(parse(["--rdzv-conf=use_agent_store=maybe", "t.py"], {}), str(tmp_path), {})


def test_a_backend_for_several_nodes_that_is_not_installed(tmp_path) -> None:
    """The sentence lists what can join several nodes."""
    (tmp_path / "t.py").touch()
    with pytest.raises(UsageError, match=r"nor installed; there are: c10d, etcd, etcd-v2, static, tcp$"):
        check_host(parse(["--nnodes=2", "--rdzv-backend=mine", "t.py"], {}), str(tmp_path), {})


def test_good_settings_touch_nothing(tmp_path) -> None:
    """A secret in a file is read, and nothing is opened, bound or looked up: the host need not exist."""
    (tmp_path / "t.py").touch()
    secret = tmp_path / "secret"
    secret.write_text("a secret of tests\n")
    secret.chmod(0o600)
    words = ["--nnodes=1:3", "--rdzv-endpoint=no-such-host.invalid", f"--rdzv-conf=token_file={secret},join_timeout=3"]
    check_host(parse([*words, "t.py"], {}), str(tmp_path), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "t.py"]
