"""The world: what a command line needs of this machine, checked before anything starts.

The words may fit together and still ask for what is not here: a script, a folder, a device, an installed name. Each is
refused in one sentence. Looks, and changes nothing.
"""

from __future__ import annotations

import os

from tenax._node.abandonment import abandon_s_from
from tenax._node.watchdog import watchdog_plan
from tenax.cli.flags import UsageError
from tenax.cli.options import MANY_NODES_BACKENDS, ONE_NODE_BACKENDS
from tenax.cli.script import check_script

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from tenax._logs.specs import LogsSpecs
    from tenax._node.placements import Placements
    from tenax.cli.options import Options
    from tenax.numa.binding import NumaOptions
    from tenax.rendezvous.api import RendezvousParameters


def current_folder() -> str:
    """Where the user stands. Raises ``UsageError`` when somebody has removed it meanwhile."""
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError("the folder this was started in is gone; change to one that exists") from error


def check_world(options: Options, cwd: str, environ: Mapping[str, str]) -> None:
    """Refuse what cannot be had here. Raises ``UsageError``."""
    check_script(options, cwd, environ)
    if options.log_dir and options.log_dir != os.devnull:
        _check_log_dir(options.log_dir, cwd)
    if options.report:
        _check_report(options.report, cwd)
    own_backends = ONE_NODE_BACKENDS if options.max_nodes == 1 else MANY_NODES_BACKENDS
    if options.rdzv_backend not in own_backends:
        _check_installed_backend(options.rdzv_backend, own_backends)
    elif options.max_nodes > 1 or not {"use_agent_store", "store_allow"}.isdisjoint(options.rdzv_configs):
        _check_rendezvous(options)
    if options.logs_specs is not None:
        logs_specs_named(options.logs_specs)
    if options.virtual_local_rank:
        _check_devices(options, environ)
    if options.numa_binding:
        places_of(options, environ)
    try:
        abandon_s_from(environ)
    except ValueError as error:
        raise UsageError(str(error)) from error
    _check_watching(environ)


def _check_watching(environ: Mapping[str, str]) -> None:
    """Where health checks are answered and workers can be asked, if anybody wants that."""
    try:
        if environ.get("TORCHELASTIC_HEALTH_CHECK_PORT"):
            from tenax._observe.health.port import health_check_port

            health_check_port(environ)
        if environ.get("TORCH_WORKER_SERVER_SOCKET"):
            from tenax.control_plane._sockets import socket_folder

            socket_folder(environ)
        watchdog_plan(environ)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _check_log_dir(log_dir: str, cwd: str) -> None:
    """A job of days must not find out at its end that nothing was kept."""
    place = os.path.join(cwd, log_dir)
    while not os.path.exists(place):
        place = os.path.dirname(place.rstrip(os.sep))
    if not os.path.isdir(place):
        raise UsageError(f"--log-dir {log_dir}: {place} is a file; name a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"--log-dir {log_dir}: {place} may not be written to; name another folder")


def _check_report(report: str, cwd: str) -> None:
    path = os.path.join(cwd, report)
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise UsageError(f"--report {report}: there is no folder {folder!r} to write it in; make it first")
    if os.path.isdir(path):
        raise UsageError(f"--report {report} is a folder; name a file")


def check_files(options: Options, environ: Mapping[str, str]) -> None:
    """Refuse paths that cannot be written, by trying. Raises ``UsageError``. Leaves no file behind."""
    if options.report:
        try:
            _try_to_write(options.report)
        except OSError as error:
            raise UsageError(
                f"--report {options.report}: cannot be written: {error.strerror}; name a file that can be written"
            ) from error
    if doors := environ.get("TENAX_DOORS"):
        try:
            os.mkdir(doors, 0o700)
        except FileExistsError:
            return  # whether it is private is checked when it is used
        except OSError as error:
            raise UsageError(
                f"TENAX_DOORS is {doors!r}, which cannot be created: {error.strerror}; name a folder whose parent "
                "exists and can be written, or leave it unset"
            ) from error


def _try_to_write(path: str) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        if os.path.isfile(path):  # a pipe or a device is opened once, for the report itself
            os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
    else:
        os.unlink(path)


def _check_installed_backend(name: str, own: frozenset[str]) -> None:
    from importlib.metadata import entry_points

    installed = {point.name for point in entry_points(group="torchrun.handlers")}
    if name not in installed:
        names = ", ".join(sorted(installed | own))
        raise UsageError(f"--rdzv-backend {name} is neither one of ours nor installed; there are: {names}")


def rendezvous_parameters(options: Options) -> RendezvousParameters:
    """What the rendezvous will be told."""
    from tenax.rendezvous.api import RendezvousParameters

    return RendezvousParameters(
        backend=options.rdzv_backend,
        endpoint=options.rdzv_endpoint,
        run_id=options.run_id,
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        local_addr=options.local_addr,
        **options.rdzv_configs,
    )


def _check_rendezvous(options: Options) -> None:
    """Settings, the file of a secret and certificates. Our handlers look at them when they are made, and do no more."""
    from tenax.rendezvous.registry import get_rendezvous_handler

    try:
        get_rendezvous_handler(rendezvous_parameters(options))
    except ValueError as error:
        raise UsageError(str(error).rstrip(".")) from error


def logs_specs_named(name: str | None) -> type[LogsSpecs]:
    """The class that decides where logs go."""
    from tenax._logs.specs import load_logs_specs

    try:
        return load_logs_specs(name)
    except ValueError as error:
        raise UsageError(f"--logs-specs {name}: {str(error).rstrip('.')}") from error


def _check_devices(options: Options, environ: Mapping[str, str]) -> None:
    """With --virtual-local-rank every worker needs a device of its own."""
    from tenax._core.environment import CUDA_VISIBLE_DEVICES, only_device

    try:
        only_device(environ.get(CUDA_VISIBLE_DEVICES), options.nproc_per_node - 1)
    except ValueError as error:
        raise UsageError(str(error)) from error


def numa_options(options: Options) -> NumaOptions | None:
    """The binding that was asked for, as the launcher knows it."""
    if options.numa_binding is None:
        return None
    from tenax.numa.binding import AffinityMode, NumaOptions

    return NumaOptions(AffinityMode(options.numa_binding))


def places_of(options: Options, environ: Mapping[str, str]) -> Placements:
    """Where workers would run on this machine. Raises ``UsageError`` when the binding cannot be had."""
    from tenax._node.placements import decide_placements
    from tenax._processes.placement import PlacementError

    try:
        return decide_placements(numa_options(options), options.nproc_per_node, environ)
    except PlacementError as error:
        raise UsageError(str(error).rstrip(".")) from error
