"""Managed mode: this agent's member of an etcd that the run brings along, one member on each control host.

    nowhere      this host is none of the named, or another agent here has the place: nothing is ever done
    place        one of the names is this host's address; its data directory is locked, its ports are free
    deciding     how to start:
                   data is here                                   -> with it, as the member it was
                   no cluster runs, or the name is new to it      -> as new, with all names as the first cluster
                   the name was started before (its host was lost) -> RemoveMember the old, AddMember, as existing;
                                                                     it listens first, and votes when it knows all
    starting     the server runs; our key is put through it until it takes it: then it serves
    serving      until ``leave`` or ``close``

What always holds:
 M1  The server ends with the agent, however the agent ends (``server_guard``).
 M2  Data is thrown away only if the cluster does not count on it: no server ever served with it and one ended by
     itself, or the cluster has removed this member. Then we decide again, from the beginning.
 M3  A member that was removed, or whose data is lost, never comes back as itself: it is added, with a new identity.
 M4  Two agents of one host never use one data directory at the same time (its lock).
 M5  With a secret, nothing is written before the cluster has users: ``root``, whose password derives from the secret.
     Every member sets them up, in steps that may be repeated, so it does not matter who is first or who is lost.

A server that ends by itself is started again, a few times, with growing pauses; then ``failed`` is told. What nothing
can announce (others that come up, a predecessor that still ends) is asked again by timers, with a bound.
"""

from __future__ import annotations

import tempfile

import msgspec

from tenax._io.etcd.binary import EtcdUnusable, find_etcd, judge_version, server_environ
from tenax._io.etcd.client import EtcdClient
from tenax._io.etcd.control_host import DEFAULT_PORT, control_hosts, split_names, taken_port
from tenax._io.etcd.data_directory import DataDirectory, DataDirectoryRefused, last_words
from tenax._io.etcd.errors import EtcdError, EtcdRefused, EtcdRejected
from tenax._io.etcd.gateway import ROOT
from tenax._io.etcd.member_address import MemberAddress
from tenax._io.etcd.member_command import first_cluster, member_command, present_cluster
from tenax._io.etcd.member_probe import MemberProbe
from tenax._io.etcd.operations import (
    AddMember,
    Members,
    PromoteMember,
    Put,
    Range,
    RemoveMember,
    SetUpUsers,
    UsersAnswer,
    key_part,
    run_prefix,
)
from tenax._io.etcd.server import ServerProcess
from tenax._io.etcd.server_guard import GRACE_S
from tenax._io.etcd.settings import EtcdSettings
from tenax._io.helper_process import HelperUnavailable
from tenax._io.tls import TlsFiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Literal

    from tenax._io.etcd.control_host import ControlHost
    from tenax._io.etcd.member_probe import Standing
    from tenax._io.etcd.operations import Member, MembersAnswer, PutAnswer, RangeAnswer, UserStep
    from tenax._io.ports import Cancellable, EventLoop

__all__ = ["ManagedMember", "ManagedSettings", "managed_settings", "member_key"]

_LEAVE_S = 3.0
_LEAVING_CALL_S = 1.2  # of that: for the cluster to let us go
_TAKEN_S = 6.0  # its server has 2 s to end, and the host may be busy
_TAKEN_PAUSE_S = 0.2
_SCOUT_S = 1.0
_SCOUT_AGAIN_S = 10.0  # after a server of ours was turned away: there is a cluster, and it will answer
_CHANGE_S = 8.0  # for RemoveMember and AddMember: etcd takes them only 5 s after all its members saw each other
_PUT_S = 5.0
_SAY_WAITING_S = 10.0
_PAUSES_S = (0.3, 0.6, 1.2, 2.5, 5.0, 5.0)
_STABLE_S = 60.0  # who served that long has a clean record
_TURNED_AWAY_S = 300.0
_USER_STEPS: tuple[UserStep, ...] = ("add user", "add role", "grant role", "enable", "list users")
# What etcd writes when it must not come back as the member it was, or seems to be.
_REMOVED = "permanently removed from the cluster"
_KNOWN = "has already been bootstrapped"


class ManagedSettings(msgspec.Struct, frozen=True):
    """``names`` are the control hosts, the same on every node: ``host`` or ``host:port``.

    ``only``: the one name that is meant to be this agent's. For several agents on one host, where more than one of the
    names can be bound; the others are then left to the others. Empty: the first name that is this host's.
    ``data_root``: where data directories are made; empty: the directory for temporary files.
    ``program``: the etcd program; empty: it is looked for (``tenax._io.etcd.binary``).
    """

    names: tuple[str, ...]
    run_id: str
    client_port: int = DEFAULT_PORT  # where a name has none of its own; members use the next one among themselves
    tls: TlsFiles | None = None
    data_root: str = ""
    only: str = ""
    program: str = ""
    secret: bytes = b""

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name != "secret"}
        fields = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"ManagedSettings({fields}, secret={'...' if self.secret else b''!r})"

    @property
    def password(self) -> str:
        """Of etcd's user ``root``; empty without a secret: then members have no users."""
        if not self.secret:
            return ""
        import hmac

        return hmac.digest(self.secret, b"tenax managed etcd root\0" + key_part(self.run_id), "sha256").hex()

    def client(self, hosts: Iterable[ControlHost]) -> EtcdSettings:
        """How to reach these members, whether they have users yet or not."""
        endpoints = tuple(str(host.endpoint) for host in hosts)
        password = self.password
        return EtcdSettings(endpoints, ROOT if password else "", password, self.tls)

    @property
    def hosts(self) -> tuple[ControlHost, ...]:
        """Raises ValueError with a sentence."""
        return control_hosts(self.names, self.client_port, is_tls=self.tls is not None)

    @property
    def endpoint_text(self) -> str:
        """For ``etcd_settings``."""
        return ",".join(str(host.endpoint) for host in self.hosts)


def managed_settings(
    endpoint_text: str,
    run_id: str,
    *,
    tls: TlsFiles | None = None,
    data_root: str = "",
    only: str = "",
    secret: bytes = b"",
) -> ManagedSettings:
    """From what the user wrote. Raises ValueError with a sentence."""
    if tls is not None and not any((tls.cert, tls.key, tls.ca)):
        tls = None
    if tls is None and "https://" in endpoint_text:
        raise ValueError(
            f"--rdzv-endpoint is {endpoint_text!r}, so the managed etcd should serve TLS, and for that every control "
            "host needs a certificate; give ssl_cert, ssl_cert_key and ca_cert in --rdzv-conf"
        )
    if tls is not None and not (tls.cert and tls.ca):
        raise ValueError(
            "managed etcd with TLS needs a certificate, its key and the authority on every node; "
            "give ssl_cert, ssl_cert_key and ca_cert in --rdzv-conf"
        )
    names = split_names(endpoint_text)
    settings = ManagedSettings(names, run_id, tls=tls, data_root=data_root, only=only, secret=secret)
    if only and only not in settings.names:
        raise ValueError(f"the member of this agent is to be {only!r}; expected one of {', '.join(settings.names)}")
    _ = settings.hosts
    return settings


def member_key(run_id: str, name: str) -> bytes:
    """Is put when the member serves for the first time, and stays: this name was started."""
    return run_prefix(run_id) + b"members/" + key_part(name)


class ManagedMember:
    """See the module. Its owner is one loop; ``say`` and ``failed`` are told sentences, from the loop."""

    def __init__(
        self,
        loop: EventLoop,
        settings: ManagedSettings,
        say: Callable[[str], None],
        failed: Callable[[str], None],
        *,
        pauses_s: tuple[float, ...] = _PAUSES_S,
        taken_s: float = _TAKEN_S,
    ) -> None:
        """``pauses_s``: before each new attempt after a server has ended by itself; then it is given up.

        ``taken_s``: how long a predecessor on this host may need to let go of the data directory and the ports.
        """
        self._pauses_s = pauses_s
        self._taken_s = taken_s
        self._loop = loop
        self._settings = settings
        self._say = say
        self._failed = failed
        self._hosts: tuple[ControlHost, ...] = ()
        self._host: ControlHost | None = None
        self._addresses: list[str] = []
        self._directory: DataDirectory | None = None
        self._program = ""
        self._environ: dict[str, str] = {}
        self._server = ServerProcess(loop, self._server_ended)
        self._place: MemberAddress | None = None
        self._scout: MemberProbe | None = None
        self._client: EtcdClient | None = None  # for the question of the moment
        self._timer: Cancellable | None = None  # for the next step; there is one at a time
        self._taken_until = 0.0
        self._scout_s = _SCOUT_S
        self._is_counted = False  # the cluster has, or may have, a member at our place
        self._log_offset = 0
        self._started_at = 0.0
        self._served_at: float | None = None  # of the running server
        self._has_said_waiting = False
        self._has_said_open = False
        self._ends = 0
        self._turned_away_at: float | None = None
        self._last_said = ""
        self._is_open = False
        self._left: Callable[[], None] | None = None
        self._is_here = False

    @property
    def is_here(self) -> bool:
        """Whether this agent runs a member: it has the place, its server may still be coming up."""
        return self._is_here

    @property
    def is_serving(self) -> bool:
        return self._served_at is not None

    @property
    def server_pid(self) -> int:
        """0 while no server runs."""
        return self._server.pid

    @property
    def data_directory(self) -> str:
        return self._directory.path if self._directory is not None else ""

    def start(self) -> None:
        """Look for our place, and begin. On a host that is none of the named nothing comes of it."""
        self._is_open = True
        try:
            self._hosts = self._settings.hosts
        except ValueError as error:
            self._fail_soon(str(error))
            return
        candidates = tuple(host for host in self._hosts if self._settings.only in ("", host.name))
        self._place = MemberAddress(self._loop, candidates, self._place_found, self._end_quietly)
        self._place.start()

    # --- place --------------------------------------------------------------------------------------------------------

    def _place_found(self, host: ControlHost, addresses: list[str]) -> None:
        self._host, self._addresses = host, addresses
        root = self._settings.data_root or tempfile.gettempdir()
        cluster = tuple(each.peer_url for each in self._hosts)
        self._directory = DataDirectory(root, self._settings.run_id, host.name, cluster)
        self._taken_until = self._loop.now() + self._taken_s
        self._take_place()

    def _take_place(self) -> None:
        """A predecessor that was killed may still hold directory or ports; a neighbour on this host holds them long."""
        host, directory = self._own()
        try:
            if not directory.acquire():
                self._take_later(self._leave_it_to_the_neighbour)
                return
            taken = taken_port(self._addresses, (host.client_port, host.peer_port))
        except DataDirectoryRefused as error:
            self._fail(str(error))
            return
        except OSError as error:
            self._fail(f"this host cannot listen for the control host {host.name}: {error.strerror}")
            return
        if taken:
            self._take_later(lambda: self._ask_who_has(taken))
            return
        self._is_here = True
        self._find_program()

    def _take_later(self, give_up: Callable[[], None]) -> None:
        if self._loop.now() < self._taken_until:
            self._then(_TAKEN_PAUSE_S, self._take_place)
        else:
            give_up()

    def _leave_it_to_the_neighbour(self) -> None:
        host, _ = self._own()
        self._say(f"another agent on this host runs the etcd member {host.name} of this run; this one runs none")
        self._end_quietly()

    def _ask_who_has(self, port: int) -> None:
        host, _ = self._own()

        def told(answer: RangeAnswer) -> None:
            if answer.kvs:
                self._leave_it_to_the_neighbour()
            else:
                complain()

        def complain(_: EtcdError | None = None) -> None:
            self._fail(
                f"port {port} of the control host {host.name} is taken by another program, and the managed etcd needs "
                f"{host.client_port} and {host.peer_port}; name another in --rdzv-endpoint ({host.host}:PORT), or, if "
                "that is an etcd to be used, leave managed=true away"
            )

        self._use_client((host,)).call(Range(self._key()), told, complain, patience_s=2.0)

    # --- program ------------------------------------------------------------------------------------------------------

    def _find_program(self) -> None:
        self._environ = server_environ()
        try:
            self._program = self._settings.program or find_etcd()
            self._server.ask_version(self._program, self._environ, self._version_told)
        except (EtcdUnusable, HelperUnavailable) as error:
            self._fail(str(error))

    def _version_told(self, printed: str) -> None:
        try:
            version = judge_version(self._program, printed)
        except EtcdUnusable as error:
            self._fail(str(error))
            return
        if version.warning:
            self._say(version.warning)
        self._decide()

    # --- deciding -----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        host, directory = self._own()
        if directory.has_data():
            self._is_counted = directory.has_served()
            self._start(first_cluster(self._hosts), "existing")
            return
        others = tuple(each for each in self._hosts if each is not host)
        self._scout = MemberProbe(
            self._loop, others, self._key(), self._settings.client(others), self._scout_s, answered=self._scouted
        )
        self._scout.start()

    def _scouted(self, standing: Standing | None) -> None:
        host, _ = self._own()
        self._scout = None
        if standing is None or (standing.of(host) and not standing.was_started(host)):
            self._start(first_cluster(self._hosts), "new")
            return
        lost = standing.of(host)
        if lost:
            self._say(f"the etcd member {host.name} was lost with its data; a new one takes its place")
        client = self._use_client(tuple(each for each in self._hosts if each is not host))
        self._remove(client, list(lost), lambda: self._add(client))

    def _remove(self, client: EtcdClient, lost: list[Member], then: Callable[[], None]) -> None:
        if not lost:
            then()
            return

        def removed(_: MembersAnswer) -> None:
            self._remove(client, lost[1:], then)

        def refused(error: EtcdError) -> None:
            if isinstance(error, EtcdRejected):  # an attempt before this one has removed it
                self._remove(client, lost[1:], then)
            else:
                self._not_changed(error)

        client.call(RemoveMember(lost[0].id), removed, refused, patience_s=_CHANGE_S)

    def _add(self, client: EtcdClient) -> None:
        """As one that only listens at first: else a cluster of one would stand still until we are up."""
        host, _ = self._own()
        self._is_counted = True

        def added(answer: MembersAnswer) -> None:
            self._start(present_cluster(answer.members, self._hosts), "existing", is_added=True)

        client.call(AddMember((host.peer_url,), is_learner=True), added, self._not_changed, patience_s=_CHANGE_S)

    def _not_changed(self, error: EtcdError) -> None:
        host, _ = self._own()
        self._try_again(
            f"the etcd cluster of this run did not let the member {host.name} in: {error.sentence}", is_turned_away=True
        )

    # --- starting -----------------------------------------------------------------------------------------------------

    def _start(self, cluster: dict[str, str], state: Literal["new", "existing"], *, is_added: bool = False) -> None:
        host, directory = self._own()
        self._drop_client()
        self._log_offset = directory.log_size()
        self._started_at = self._loop.now()
        command = member_command(
            self._program,
            host,
            self._addresses,
            directory.data,
            self._settings.run_id,
            cluster,
            state,
            self._settings.tls,
        )
        try:
            self._server.start(command, self._environ, directory.log, lock=directory.lock)
        except HelperUnavailable as error:
            self._fail(str(error))
            return
        if is_added:
            self._ask_for_a_vote()
        else:
            self._put_key()

    def _ask_for_a_vote(self) -> None:
        """Ask the others whether we only listen, and if so, for a vote, which they give to who knows all they know."""
        others = tuple(each for each in self._hosts if each is not self._host)
        client = self._use_client(others)

        def told(answer: MembersAnswer) -> None:
            listening = [member for member in answer.members if self._is_ours(member) and member.is_learner]
            if not listening:
                self._put_key()
                return
            client.call(PromoteMember(listening[0].id), lambda _: self._put_key(), again, patience_s=_PUT_S)

        def again(_: EtcdError) -> None:
            self._say_waiting()
            self._then(_TAKEN_PAUSE_S, self._ask_for_a_vote)

        client.call(Members(), told, lambda _: self._put_key(), patience_s=_PUT_S)

    def _put_key(self) -> None:
        host, _ = self._own()
        client = self._use_client((host,))
        password = self._settings.password
        steps = list(_USER_STEPS) if password else []

        def next_step(answer: UsersAnswer) -> None:
            strange = [user for user in answer.users if user != ROOT]
            if strange:
                self._fail(
                    f"the etcd members of this run have a user {strange[0]!r} that tenax did not add: someone else "
                    f"reached them before they had users; choose another --rdzv-id, and keep others from the ports "
                    f"{host.client_port} and {host.peer_port}"
                )
            elif steps:
                client.call(SetUpUsers(steps.pop(0), password), next_step, self._not_served, patience_s=_PUT_S)
            else:
                put = Put(self._key(), host.client_url.encode())
                client.call(put, self._served, self._not_served, patience_s=_PUT_S)

        next_step(UsersAnswer())

    def _not_served(self, error: EtcdError) -> None:
        host, directory = self._own()
        if isinstance(error, EtcdRefused):
            self._fail(
                f"the etcd member {host.name} refuses its own agent: {error.sentence}; give every node the same secret "
                f"(token_file). If {directory.path} holds data of an earlier run with another secret, remove it, or "
                "choose another --rdzv-id"
            )
            return
        self._say_waiting()
        self._then(_TAKEN_PAUSE_S, self._ask_for_a_vote if len(self._hosts) > 1 else self._put_key)

    def _say_waiting(self) -> None:
        if self._has_said_waiting or self._loop.now() - self._started_at < _SAY_WAITING_S:
            return
        self._has_said_waiting = True
        host, _ = self._own()
        names = ", ".join(each.name for each in self._hosts)
        self._say(
            f"the etcd member {host.name} runs, and waits for a majority of the control hosts ({names}); "
            "start tenax on them, and check that they reach each other at the ports "
            f"{host.client_port} and {host.peer_port}"
        )

    def _served(self, _: PutAnswer) -> None:
        host, directory = self._own()
        directory.note_served()
        self._drop_client()
        self._served_at = self._loop.now()
        self._is_counted = True
        self._scout_s = _SCOUT_S
        self._turned_away_at = None
        self._say(f"this node runs the etcd member {host.name}, at {host.client_url}")
        if not self._settings.secret and self._settings.tls is None and not self._has_said_open:
            self._has_said_open = True
            self._say(
                f"the etcd members of this run are open to everyone who reaches the ports {host.client_port} and "
                f"{host.peer_port}; give every node the same secret with --rdzv-conf token_file=FILE"
            )

    # --- a server that ended ------------------------------------------------------------------------------------------

    def _server_ended(self, how: str, by_itself: bool) -> None:
        host, directory = self._own()
        self._drop_client()
        self._cancel_timer()
        if self._served_at is not None and self._loop.now() - self._served_at > _STABLE_S:
            self._ends, self._last_said = 0, ""
        self._served_at = None
        if self._left is not None:
            self._finish_leaving()
            return
        log = directory.log_since(self._log_offset)
        if _REMOVED in log or (by_itself and not directory.has_served()):
            directory.discard_data()
            self._scout_s = _SCOUT_AGAIN_S
        sentence = f"the etcd member {host.name} has ended: {how}; its last words: {last_words(log) or 'none'}"
        if _REMOVED in log:
            sentence = f"the etcd member {host.name} was removed from the cluster by another; its data is of no use now"
        self._try_again(sentence, is_turned_away=any(words in log for words in (_REMOVED, _KNOWN)))

    def _try_again(self, sentence: str, *, is_turned_away: bool) -> None:
        """A server that cannot live gets a few attempts; a cluster that does not let us in, time to be a majority."""
        self._drop_client()
        if self._turned_away_at is None or not is_turned_away:
            self._turned_away_at = self._loop.now() if is_turned_away else None
        is_over = (
            self._loop.now() - self._turned_away_at > _TURNED_AWAY_S
            if self._turned_away_at is not None
            else self._ends >= len(self._pauses_s)
        )
        if is_over:
            _, directory = self._own()
            self._fail(
                f"{sentence}; this was tried {self._ends + 1} times. If control hosts still hold data of an earlier "
                f"run of this name, end it there and remove {directory.path}, or choose another --rdzv-id"
            )
            return
        if sentence != self._last_said:
            self._last_said = sentence
            self._say(f"{sentence}; trying again")
        self._then(self._pauses_s[min(self._ends, len(self._pauses_s) - 1)], self._decide)
        self._ends += 1

    # --- the end ------------------------------------------------------------------------------------------------------

    def leave(self, done: Callable[[], None]) -> None:
        """Take this member out of the cluster, so that the majority of those who stay shrinks, unless it is the last.

        Then the server is stopped and its data removed. ``done`` is called from the loop, after 3 s at the latest.
        """
        assert self._left is None, "leaving once is enough"
        self._left = done
        self._stop_asking()
        if not self._is_open or not self._is_here:
            self._loop.soon(self._finish_leaving)
            return
        self._timer = self._loop.at(self._loop.now() + _LEAVE_S, self._finish_leaving)
        self._taken_until = self._loop.now() + _LEAVE_S
        if not self._is_counted or len(self._hosts) == 1:
            self._stop_server()
            return
        # One who stays carries it out, so it knows. Our own server might take the news with it, and the others would
        # wait for a member that is gone.
        client = self._use_client(tuple(each for each in self._hosts if each is not self._host))
        client.call(Members(), self._leave_these, self._stop_server, patience_s=_LEAVING_CALL_S / 2)

    def _leave_these(self, answer: MembersAnswer) -> None:
        ours = [member for member in answer.members if self._is_ours(member)]
        if not ours or len(answer.members) == 1 or self._client is None:
            self._stop_server()
            return
        self._client.call(RemoveMember(ours[0].id), self._stop_server, self._stop_server, patience_s=_LEAVING_CALL_S)

    def _stop_server(self, _: object = None) -> None:
        self._drop_client()
        if self._server.is_running:
            self._server.stop(max(0.1, min(GRACE_S, self._taken_until - self._loop.now() - 0.4)))
        else:
            self._finish_leaving()

    def _finish_leaving(self) -> None:
        done, self._left = self._left, None
        if done is not None:
            self._shut(is_data_wanted=False)
            done()

    def close(self) -> None:
        """End at once. The server is killed, and gone when this returns, after 2 s at the latest. Its data stays."""
        self._left = None
        self._shut(is_data_wanted=True)

    def _shut(self, *, is_data_wanted: bool) -> None:
        self._is_open = False
        self._served_at = None
        self._stop_asking()
        self._server.kill()
        if self._directory is not None:
            if self._is_here and not (is_data_wanted and self._directory.has_data()):
                self._directory.remove()
            self._directory.release()
        self._is_here = False

    # --- what every step needs ----------------------------------------------------------------------------------------

    def _own(self) -> tuple[ControlHost, DataDirectory]:
        assert self._host is not None
        assert self._directory is not None
        return self._host, self._directory

    def _is_ours(self, member: Member) -> bool:
        return self._own()[0].peer_url in member.peer_urls

    def _key(self) -> bytes:
        return member_key(self._settings.run_id, self._own()[0].name)

    def _use_client(self, hosts: tuple[ControlHost, ...]) -> EtcdClient:
        self._drop_client()
        self._client = EtcdClient(self._loop, self._settings.client(hosts))
        return self._client

    def _drop_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _then(self, after_s: float, step: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self._loop.at(self._loop.now() + after_s, step)

    def _cancel_timer(self) -> None:
        if self._timer is not None and self._left is None:  # leaving has its deadline there
            self._timer.cancel()
            self._timer = None

    def _stop_asking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._place is not None:
            self._place.close()
            self._place = None
        if self._scout is not None:
            self._scout.close()
            self._scout = None
        self._drop_client()

    def _end_quietly(self) -> None:
        self._stop_asking()
        self._is_here = False
        if self._directory is not None:
            self._directory.release()

    def _fail_soon(self, sentence: str) -> None:
        self._then(0.0, lambda: self._fail(sentence))

    def _fail(self, sentence: str) -> None:
        self.close()
        self._failed(sentence)
