"""Checks of this host before a start: script, folders, devices, installed plug-ins.

Each failed check is a ``UsageError``. Changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from tenax._logs.specs import LogsSpecs, load_logs_specs
from tenax._node.job import rendezvous_handler, watchdog_file
from tenax._node.workers import decide_placements
from tenax.cli.flags import UsageError, usage_errors
from tenax.cli.options import MANY_NODES_BACKENDS, ONE_NODE_BACKENDS, Options
from tenax.cli.script import check_script


@usage_errors()
def check_host(options: Options, environ: Mapping[str, str], cwd: str = "") -> None:
    """Raise ``UsageError`` if this host lacks something that the options need. ``cwd``: empty: the current folder."""
    try:
        cwd = cwd or os.getcwd()
    except OSError as error:
        raise UsageError("the current folder was removed; change to another folder") from error
    check_script(options, cwd, environ)
    if options.log_dir and options.log_dir != os.devnull:
        _check_log_dir(options.log_dir, cwd)
    if options.report:
        path = os.path.join(cwd, options.report)
        folder = os.path.dirname(path)
        if not os.path.isdir(folder):
            raise UsageError(f"--report {options.report}: the folder {folder!r} does not exist; create it first")
        if os.path.isdir(path):
            raise UsageError(f"--report {options.report} is a folder, not a file")
    own_backends = ONE_NODE_BACKENDS if options.max_nodes == 1 else MANY_NODES_BACKENDS
    if options.rdzv_backend not in own_backends:
        from importlib.metadata import entry_points

        installed = {point.name for point in entry_points(group="torchrun.handlers")}
        if options.rdzv_backend not in installed:
            names = ", ".join(sorted(installed | own_backends))
            raise UsageError(f"unknown --rdzv-backend {options.rdzv_backend!r}; installed backends: {names}")
    elif options.max_nodes > 1 or not {"use_agent_store", "store_allow"}.isdisjoint(options.rdzv_configs):
        rendezvous_handler(options)  # tenax's own read settings, secret and certificates, and start nothing
    if options.logs_specs_name is not None:
        load_logs_specs_class(options.logs_specs_name)
    if options.virtual_local_rank:
        from tenax._core.environment import CUDA_VISIBLE_DEVICES, only_device

        only_device(environ.get(CUDA_VISIBLE_DEVICES), options.nproc_per_node - 1)  # each worker needs its own
    if options.numa_options is not None:
        decide_placements(options.numa_options, options.nproc_per_node, environ)
    if environ.get("TORCHELASTIC_HEALTH_CHECK_PORT"):
        from tenax._observe.health.check import health_check_port

        health_check_port(environ)
    if environ.get("TORCH_WORKER_SERVER_SOCKET"):
        from tenax.control_plane._sockets import socket_folder

        socket_folder(environ)
    watchdog_file(environ)


def _check_log_dir(log_dir: str, cwd: str) -> None:
    """Check that the log folder can be created and written, so that a job of days does not run without logs."""
    path = os.path.join(cwd, log_dir)
    while not os.path.exists(path):
        path = os.path.dirname(path.rstrip(os.sep))
    if not os.path.isdir(path):
        raise UsageError(f"--log-dir {log_dir}: {path} is a file, not a folder")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--log-dir {log_dir}: no permission to write to {path}; use another folder")


def check_files(options: Options, environ: Mapping[str, str]) -> None:
    """Raise ``UsageError`` for paths that cannot be written, found by trying. Leaves no file behind."""
    if path := options.report:
        try:
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                os.unlink(path)
            except FileExistsError:
                if os.path.isfile(path):  # a pipe or a device is opened only once, to write the report
                    os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        except OSError as error:
            what = f"could not write the file: {error.strerror}; use another file"
            raise UsageError(f"--report {path}: {what}") from error
    if sockets := environ.get("TENAX_PRIVATE_DIR"):
        try:
            os.mkdir(sockets, 0o700)
        except FileExistsError:
            return  # its permissions are checked when it is used
        except OSError as error:
            raise UsageError(
                f"TENAX_PRIVATE_DIR: could not create {sockets!r}: {error.strerror}; set it to a folder whose parent "
                "is writable, or unset it"
            ) from error


def load_logs_specs_class(name: str | None) -> type[LogsSpecs]:
    """Return the class that decides where logs go. Raises ``UsageError``."""
    with usage_errors(f"--logs-specs {name}: "):
        return load_logs_specs(name)
