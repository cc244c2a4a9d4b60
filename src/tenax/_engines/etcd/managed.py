"""Managed etcd: a run brings its own etcd, with one member on each control host. This is one agent's member.

    nowhere      this host is not a control host, or another agent here runs the member: do nothing
    claimed      one of the names is this host's; its data directory is locked and its ports are free
    deciding     how to start:
                   data exists                                     -> with the data, as the same member
                   no cluster runs, or it does not know the name   -> as new, with all names as the initial cluster
                   the name was started before (its host was lost) -> RemoveMember the old one, AddMember, as existing;
                                                                      first as a learner, promoted when it caught up
    starting     the server runs; it serves once it accepts a put of the member's key
    serving      until ``leave`` or ``close``

Invariants:
 M1  The server ends with the agent, however the agent ends (``ServerProcess``).
 M2  Data is discarded only if the cluster does not rely on it: the server exited by itself before it ever served with
     the data, or the cluster has removed this member. Then the decision is made again from the start.
 M3  A member that was removed, or whose data is lost, never comes back as itself: it is added with a new identity.
 M4  Two agents of one host never use one data directory at the same time (its lock).
 M5  With a secret, nothing is written before the cluster has users: ``root``, whose password derives from the secret.
     Every member sets them up in idempotent steps, so the order and the loss of members do not matter.

A server that exits by itself is restarted a few times, with growing pauses; then ``failed`` is called. Conditions that
no event announces (other members starting, a predecessor that still exits) are retried by timers, with a limit.
"""

from __future__ import annotations

import tempfile

import msgspec

from tenax._core.etcd import operations as ops
from tenax._core.etcd.errors import EtcdError, EtcdRefused, EtcdRejected
from tenax._core.text import concealed_repr
from tenax._io.etcd import control_host
from tenax._io.etcd.binary import EtcdUnusable, find_etcd, judge_version, server_environ
from tenax._io.etcd.client import EtcdClient
from tenax._io.etcd.data_directory import DataDirectory, DataDirectoryRefused, last_messages
from tenax._io.etcd.gateway import ROOT
from tenax._io.etcd.member_probe import MemberProbe
from tenax._io.etcd.settings import EtcdSettings
from tenax._io.helper_process import HelperUnavailable
from tenax._io.loop import NO_TIMER
from tenax._io.tls import TlsFiles
from tenax._processes.server_process import GRACE_S, ServerProcess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Literal, TypeVar

    from tenax._io.etcd.control_host import ControlHost
    from tenax._io.etcd.member_probe import Standing
    from tenax._io.interfaces import Cancellable, EventLoop

    S = TypeVar("S", control_host.MemberAddress, MemberProbe, EtcdClient)

__all__ = ["ManagedMember", "ManagedSettings", "managed_settings", "member_key"]

_LEAVE_S = 3.0
_LEAVE_CALL_S = 1.2  # of that: for removing the member
_TAKEN_S = 6.0  # the predecessor's server has 2 s to exit, and the host may be busy
_TAKEN_PAUSE_S = 0.2
_PROBE_S = 1.0
_PROBE_AGAIN_S = 10.0  # after the cluster rejected the server: there is a cluster, and it will answer
_CHANGE_S = 8.0  # for RemoveMember and AddMember: etcd accepts them 5 s after all its members are connected
_PUT_S = 5.0
_REPORT_WAITING_S = 10.0
_PAUSES_S = (0.3, 0.6, 1.2, 2.5, 5.0, 5.0)
_STABLE_S = 60.0  # serving that long resets the count of exits
_REJECTED_S = 300.0
_USER_STEPS: tuple[ops.UserStep, ...] = ("add user", "add role", "grant role", "enable", "list users")
# etcd's log messages when the server must not come back as the same member.
_REMOVED = "permanently removed from the cluster"
_KNOWN = "has already been bootstrapped"


class ManagedSettings(msgspec.Struct, frozen=True):
    """``names`` are the control hosts, the same on every node: ``host`` or ``host:port``.

    ``only``: this agent's name, for several agents on one host, where more than one of the names can be bound. Empty:
    the first name that is this host's.
    ``data_root``: the parent of data directories; empty: the directory for temporary files.
    ``program``: the etcd program; empty: search for it (``tenax._io.etcd.binary``).
    """

    names: tuple[str, ...]
    run_id: str
    client_port: int = control_host.DEFAULT_PORT  # for names without a port; the peer port is the next one
    tls: TlsFiles | None = None
    data_root: str = ""
    only: str = ""
    program: str = ""
    secret: bytes = b""

    __repr__ = concealed_repr

    @property
    def password(self) -> str:
        """The password of etcd's user ``root``; empty without a secret, then there are no users."""
        if not self.secret:
            return ""
        import hmac

        return hmac.digest(self.secret, b"tenax managed etcd root\0" + ops.key_part(self.run_id), "sha256").hex()

    def client(self, hosts: Iterable[ControlHost]) -> EtcdSettings:
        """Return client settings for these members, with or without users."""
        endpoints = tuple(str(host.endpoint) for host in hosts)
        password = self.password
        return EtcdSettings(endpoints, ROOT if password else "", password, self.tls)

    @property
    def hosts(self) -> tuple[ControlHost, ...]:
        """The parsed names. Raises ValueError, but not for those that ``managed_settings`` has checked."""
        return control_host.control_hosts(self.names, self.client_port, is_tls=self.tls is not None)

    @property
    def endpoint_text(self) -> str:
        """The endpoints, for ``etcd_settings``."""
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
    """Create settings from the user's options. Raises ValueError."""
    if tls is not None and not any((tls.cert, tls.key, tls.ca)):
        tls = None
    if tls is None and "https://" in endpoint_text:
        raise ValueError(
            f"--rdzv-endpoint is {endpoint_text!r}, and with https:// managed etcd needs a certificate on every "
            "control host; set ssl_cert, ssl_cert_key and ca_cert in --rdzv-conf"
        )
    if tls is not None and not (tls.cert and tls.ca):
        raise ValueError(
            "managed etcd with TLS needs a certificate, its key and the CA on every node; "
            "set ssl_cert, ssl_cert_key and ca_cert in --rdzv-conf"
        )
    names = control_host.split_names(endpoint_text)
    settings = ManagedSettings(names, run_id, tls=tls, data_root=data_root, only=only, secret=secret)
    if only and only not in settings.names:
        raise ValueError(f"managed_only is {only!r}; expected one of {', '.join(settings.names)}")
    _ = settings.hosts
    return settings


def member_key(run_id: str, name: str) -> bytes:
    """Return the key that is put when the member first serves. It stays, and shows that the name was started."""
    return ops.run_prefix(run_id) + b"members/" + ops.key_part(name)


class ManagedMember:
    """See the module. Belongs to one loop, which calls ``print_line`` and ``failed`` with messages for the user."""

    def __init__(
        self,
        loop: EventLoop,
        settings: ManagedSettings,
        print_line: Callable[[str], None],
        failed: Callable[[str], None],
        *,
        pauses_s: tuple[float, ...] = _PAUSES_S,
        taken_s: float = _TAKEN_S,
    ) -> None:
        """``pauses_s``: the pause before each restart of a server that exited by itself; the number limits restarts.

        ``taken_s``: how long a predecessor on this host may take to release the data directory and the ports.
        """
        self._pauses_s = pauses_s
        self._taken_s = taken_s
        self._loop = loop
        self._settings = settings
        self._print_line = print_line
        self._failed = failed
        self._hosts: tuple[ControlHost, ...] = ()
        self._addresses: list[str] = []  # empty until the name of this host is found; it sets the next two
        self._host: ControlHost
        self.directory: DataDirectory
        self._program = ""
        self._environ: dict[str, str] = {}
        self.server = ServerProcess(loop, self._server_ended)
        self._step: control_host.MemberAddress | MemberProbe | EtcdClient | None = None  # what the current step uses
        self._timer: Cancellable = NO_TIMER  # for the next step
        self._claim_until = 0.0
        self._probe_s = _PROBE_S
        self._is_member = False  # the cluster has, or may have, a member with this host's URL
        self._log_offset = 0
        self._started_at = 0.0
        self._served_at: float | None = None  # of the running server
        self._printed: set[str] = set()  # by ``_print_once``
        self._ends = 0
        self._rejected_since: float | None = None
        self._last_reported = ""
        self._is_open = False
        self._left: Callable[[], None] | None = None
        self.is_here = False  # this agent runs a member; its server may still be starting

    @property
    def is_serving(self) -> bool:
        return self._served_at is not None

    def start(self) -> None:
        """Start this host's member. Does nothing on a host that is not a control host."""
        self._is_open = True
        self._hosts = self._settings.hosts
        candidates = tuple(host for host in self._hosts if self._settings.only in ("", host.name))
        self._use(control_host.MemberAddress(self._loop, candidates, self._host_found, self._stand_down)).start()

    # --- claiming -----------------------------------------------------------------------------------------------------

    def _host_found(self, host: ControlHost, addresses: list[str]) -> None:
        self._host, self._addresses = host, addresses
        root = self._settings.data_root or tempfile.gettempdir()
        cluster = tuple(each.peer_url for each in self._hosts)
        self.directory = DataDirectory(root, self._settings.run_id, host.name, cluster)
        self._claim_until = self._loop.now() + self._taken_s
        self._claim()

    def _claim(self) -> None:
        """Lock the directory and check the ports. A killed predecessor may still hold them, or another agent does."""
        host = self._host
        try:
            if not self.directory.acquire():
                self._claim_later(self._yield_to_other_agent)
                return
            taken = control_host.taken_port(self._addresses, (host.client_port, host.peer_port))
        except DataDirectoryRefused as error:
            self._fail(str(error))
            return
        except OSError as error:
            self._fail(f"cannot listen at the address of control host {host.name}: {error.strerror}")
            return
        if taken:
            self._claim_later(lambda: self._check_port_owner(taken))
            return
        self.is_here = True
        self._find_program()

    def _claim_later(self, give_up: Callable[[], None]) -> None:
        if self._loop.now() < self._claim_until:
            self._schedule(_TAKEN_PAUSE_S, self._claim)
        else:
            give_up()

    def _yield_to_other_agent(self) -> None:
        self._print_line(f"another agent on this host runs etcd member {self._host.name}; this agent runs none")
        self._stand_down()

    def _check_port_owner(self, port: int) -> None:
        host = self._host

        def received(answer: ops.RangeAnswer) -> None:
            if answer.kvs:
                self._yield_to_other_agent()
            else:
                fail()

        def fail(_: EtcdError | None = None) -> None:
            self._fail(
                f"port {port} of control host {host.name} is in use by another program; managed etcd needs "
                f"{host.client_port} and {host.peer_port}. Choose another port in --rdzv-endpoint ({host.host}:PORT); "
                "to use an etcd that already runs there, remove managed=true"
            )

        self._use_client((host,)).call(ops.Range(self._key()), received, fail, patience_s=2.0)

    # --- program ------------------------------------------------------------------------------------------------------

    def _find_program(self) -> None:
        self._environ = server_environ()
        try:
            self._program = self._settings.program or find_etcd()
            self.server.query_version(self._program, self._environ, self._version_received)
        except (EtcdUnusable, HelperUnavailable) as error:
            self._fail(str(error))

    def _version_received(self, printed: str) -> None:
        try:
            version = judge_version(self._program, printed)
        except EtcdUnusable as error:
            self._fail(str(error))
            return
        if version.warning:
            self._print_line(version.warning)
        self._decide()

    # --- deciding -----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        if self.directory.has_data():
            self._is_member = self.directory.has_served()
            self._start(control_host.first_cluster(self._hosts), "existing")
            return
        settings = self._settings.client(self._others)
        probe = MemberProbe(self._loop, self._others, self._key(), settings, self._probe_s, self._probed)
        self._use(probe).start()

    def _probed(self, standing: Standing | None) -> None:
        host = self._host
        if standing is None or (standing.of(host) and not standing.was_started(host)):
            self._start(control_host.first_cluster(self._hosts), "new")
            return
        lost = standing.of(host)
        if lost:
            self._print_line(f"etcd member {host.name} was lost with its data; replacing it")
        self._replace(self._use_client(self._others), list(lost))

    def _replace(self, client: EtcdClient, lost: list[ops.Member]) -> None:
        """Remove the lost members, then add this one: as a learner, because a voter would block a cluster of one."""

        def removed(_: object) -> None:
            self._replace(client, lost[1:])

        def added(answer: ops.MembersAnswer) -> None:
            self._start(control_host.present_cluster(answer.members, self._hosts), "existing", is_added=True)

        def failed(error: EtcdError) -> None:
            if lost and isinstance(error, EtcdRejected):  # an earlier attempt has removed it
                removed(error)
                return
            message = f"the etcd cluster of this run did not accept member {self._host.name}: {error.message}"
            self._try_again(message, is_rejected=True)

        if lost:
            client.call(ops.RemoveMember(lost[0].id), removed, failed, patience_s=_CHANGE_S)
        else:
            self._is_member = True
            client.call(ops.AddMember((self._host.peer_url,), is_learner=True), added, failed, patience_s=_CHANGE_S)

    # --- starting -----------------------------------------------------------------------------------------------------

    def _start(self, cluster: dict[str, str], state: Literal["new", "existing"], *, is_added: bool = False) -> None:
        directory, settings = self.directory, self._settings
        self._end_step()
        self._log_offset = directory.log_size()
        self._started_at = self._loop.now()
        addresses, run_id = self._addresses, settings.run_id
        command = control_host.member_command(
            self._program, self._host, addresses, directory.data, run_id, cluster, state, settings.tls
        )
        try:
            self.server.start(command, self._environ, directory.log, lock=directory.lock)
        except HelperUnavailable as error:
            self._fail(str(error))
            return
        if is_added:
            self._request_promotion()
        else:
            self._put_key()

    def _request_promotion(self) -> None:
        """If this member is a learner, request its promotion, which succeeds once it has caught up."""
        client = self._use_client(self._others)

        def received(answer: ops.MembersAnswer) -> None:
            learners = [member for member in answer.members if self._is_own(member) and member.is_learner]
            if not learners:
                self._put_key()
                return
            client.call(ops.PromoteMember(learners[0].id), lambda _: self._put_key(), again, patience_s=_PUT_S)

        def again(_: EtcdError) -> None:
            self._report_waiting()
            self._schedule(_TAKEN_PAUSE_S, self._request_promotion)

        client.call(ops.Members(), received, lambda _: self._put_key(), patience_s=_PUT_S)

    def _put_key(self) -> None:
        host = self._host
        client = self._use_client((host,))
        password = self._settings.password
        steps = list(_USER_STEPS) if password else []

        def next_step(answer: ops.UsersAnswer) -> None:
            unknown = [user for user in answer.users if user != ROOT]
            if unknown:
                self._fail(
                    f"the etcd cluster of this run has a user {unknown[0]!r} that tenax did not add: another client "
                    f"connected before the password was set; choose another --rdzv-id, and restrict access to ports "
                    f"{host.client_port} and {host.peer_port}"
                )
            elif steps:
                client.call(ops.SetUpUsers(steps.pop(0), password), next_step, self._not_served, patience_s=_PUT_S)
            else:
                put = ops.Put(self._key(), host.client_url.encode())
                client.call(put, self._served, self._not_served, patience_s=_PUT_S)

        next_step(ops.UsersAnswer())

    def _not_served(self, error: EtcdError) -> None:
        if isinstance(error, EtcdRefused):
            self._fail(
                f"etcd member {self._host.name} refused its own agent: {error.message}; give every node the same "
                f"secret (token_file). If {self.directory.path} holds data of an earlier run with another secret, "
                "remove it or choose another --rdzv-id"
            )
            return
        self._report_waiting()
        self._schedule(_TAKEN_PAUSE_S, self._request_promotion if len(self._hosts) > 1 else self._put_key)

    def _report_waiting(self) -> None:
        if self._loop.now() - self._started_at < _REPORT_WAITING_S:
            return
        host = self._host
        names = ", ".join(each.name for each in self._hosts)
        self._print_once(
            f"etcd member {host.name} is waiting for a majority of the control hosts ({names}); start tenax on them, "
            f"and check that they can reach each other at ports {host.client_port} and {host.peer_port}"
        )

    def _served(self, _: ops.PutAnswer) -> None:
        host = self._host
        self.directory.note_served()
        self._end_step()
        self._served_at = self._loop.now()
        self._is_member = True
        self._probe_s = _PROBE_S
        self._rejected_since = None
        self._print_line(f"this node runs etcd member {host.name} at {host.client_url}")
        if not self._settings.secret and self._settings.tls is None:
            self._print_once(
                f"any client that can reach ports {host.client_port} and {host.peer_port} can read and change the "
                "etcd of this run; to require a password, give every node the same secret "
                "(--rdzv-conf token_file=FILE)"
            )

    # --- a server that ended ------------------------------------------------------------------------------------------

    def _server_ended(self, how: str, by_itself: bool) -> None:
        name, directory = self._host.name, self.directory
        self._end_step()
        self._cancel_timer()
        if self._served_at is not None and self._loop.now() - self._served_at > _STABLE_S:
            self._ends, self._last_reported = 0, ""
        self._served_at = None
        if self._left is not None:
            self._finish_leave()
            return
        log = directory.log_since(self._log_offset)
        if _REMOVED in log or (by_itself and not directory.has_served()):
            directory.discard_data()
            self._probe_s = _PROBE_AGAIN_S
        message = f"etcd member {name} {how}; last log messages: {last_messages(log) or 'none'}"
        if _REMOVED in log:
            message = f"etcd member {name} was removed from the cluster; its data was discarded"
        self._try_again(message, is_rejected=any(text in log for text in (_REMOVED, _KNOWN)))

    def _try_again(self, message: str, *, is_rejected: bool) -> None:
        """Retry: a few times after the server exited; for ``_REJECTED_S`` if the cluster rejects it."""
        self._end_step()
        if self._rejected_since is None or not is_rejected:
            self._rejected_since = self._loop.now() if is_rejected else None
        since = self._rejected_since
        if self._ends >= len(self._pauses_s) if since is None else self._loop.now() - since > _REJECTED_S:
            self._fail(
                f"{message}; gave up after {self._ends + 1} attempts. If control hosts still hold data of an earlier "
                f"run with this --rdzv-id, stop it there and remove {self.directory.path}, or choose another --rdzv-id"
            )
            return
        if message != self._last_reported:
            self._last_reported = message
            self._print_line(f"{message}; retrying")
        self._schedule(self._pauses_s[min(self._ends, len(self._pauses_s) - 1)], self._decide)
        self._ends += 1

    # --- the end ------------------------------------------------------------------------------------------------------

    def leave(self, done: Callable[[], None]) -> None:
        """Remove this member from the cluster, unless it is the last, so that the remaining members need fewer votes.

        Then stop the server and remove its data. ``done`` is called from the loop, after 3 s at the latest.
        """
        assert self._left is None, "leaving once is enough"
        self._left = done
        self._cancel_pending()
        if not self._is_open or not self.is_here:
            self._loop.soon(self._finish_leave)
            return
        self._timer = self._loop.at(self._loop.now() + _LEAVE_S, self._finish_leave)
        self._claim_until = self._loop.now() + _LEAVE_S
        if not self._is_member or len(self._hosts) == 1:
            self._stop_server()
            return
        # Send it to a member that stays. This server might exit before the change is replicated, and the others would
        # wait for a member that is gone.
        client = self._use_client(self._others)

        def remove_own(answer: ops.MembersAnswer) -> None:
            own = [member for member in answer.members if self._is_own(member)]
            if not own or len(answer.members) == 1:
                self._stop_server()
            else:
                client.call(ops.RemoveMember(own[0].id), self._stop_server, self._stop_server, patience_s=_LEAVE_CALL_S)

        client.call(ops.Members(), remove_own, self._stop_server, patience_s=_LEAVE_CALL_S / 2)

    def _stop_server(self, _: object = None) -> None:
        self._end_step()
        if self.server.is_running:
            self.server.stop(max(0.1, min(GRACE_S, self._claim_until - self._loop.now() - 0.4)))
        else:
            self._finish_leave()

    def _finish_leave(self) -> None:
        done, self._left = self._left, None
        if done is not None:
            self._shut_down(keeps_data=False)
            done()

    def close(self) -> None:
        """Kill the server and wait until it is gone, at most 2 s. Its data stays."""
        self._left = None
        self._shut_down(keeps_data=True)

    def _shut_down(self, *, keeps_data: bool) -> None:
        self._is_open = False
        self._served_at = None
        self._cancel_pending()
        self.server.kill()
        if self.is_here and not (keeps_data and self.directory.has_data()):
            self.directory.remove()
        self._release()

    # --- helpers ------------------------------------------------------------------------------------------------------

    @property
    def _others(self) -> tuple[ControlHost, ...]:
        return tuple(each for each in self._hosts if each is not self._host)

    def _print_once(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            self._print_line(text)

    def _is_own(self, member: ops.Member) -> bool:
        return self._host.peer_url in member.peer_urls

    def _key(self) -> bytes:
        return member_key(self._settings.run_id, self._host.name)

    def _use_client(self, hosts: tuple[ControlHost, ...]) -> EtcdClient:
        return self._use(EtcdClient(self._loop, self._settings.client(hosts)))

    def _use(self, step: S) -> S:
        self._end_step()
        self._step = step
        return step

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.close()
            self._step = None

    def _schedule(self, after_s: float, step: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self._loop.at(self._loop.now() + after_s, step)

    def _cancel_timer(self) -> None:
        if self._left is None:  # while leaving, the timer is the deadline
            self._timer.cancel()

    def _cancel_pending(self) -> None:
        self._timer.cancel()
        self._end_step()

    def _stand_down(self) -> None:
        self._cancel_pending()
        self._release()

    def _release(self) -> None:
        self.is_here = False
        if self._addresses:
            self.directory.release()

    def _fail(self, message: str) -> None:
        self.close()
        self._failed(message)
