"""A pod, as Kubernetes makes it, of namespaces: the agent is process 1 of a user that does not exist, and nothing is
writable but one volume in memory. Pods share the network of this host.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from kit.processes import ENV, TIMEOUT_S, interpreter_for, until

USER = 12345
_PROGRAMS = ("unshare", "nsenter", "setpriv", "mount")
_TENAX = "import sys; from tenax.cli.main import main; sys.exit(main())"
_VOLUME = "/srv"  # every user can enter it
# $1: the volume, $2: the folder with the files of the pod, $3: its name. The rest is the command.
_ENTER = """
set -e
volume=$1 files=$2; hostname "$3"; shift 3
mount --make-rprivate /
mount -t tmpfs -o mode=1777 tmpfs "$volume"
cp "$files/train.py" "$volume"
mount --bind "$files/hosts" /etc/hosts
mount -t proc proc /proc
for point in $(cut -d ' ' -f 2 /proc/self/mounts | sort -ru); do
    case $point in /proc* | /sys* | /dev | /dev/pts | "$volume") ;; *) mount -o remount,bind,ro "$point" ;; esac
done
cd "$volume"
exec "$@"
"""


def why_not() -> str:
    """Return why there can be no pods here; empty if there can."""
    if not sys.platform.startswith("linux"):
        return "namespaces need Linux"
    if os.getuid() != 0:
        return "creating namespaces needs root"
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"the program {missing[0]} is missing"
    return ""


class Pod:
    """Runs ``train.py`` of the folder. ``hosts`` is its /etc/hosts."""

    def __init__(self, folder: Path, name: str, environ: dict[str, str], *arguments: str) -> None:
        self.hosts = folder / "hosts"
        self._output = folder / "output"
        self._environ = {
            "PATH": "/usr/bin:/bin",
            "TMPDIR": _VOLUME,
            "PYTHONPATH": ENV["PYTHONPATH"],
            "RES_OPTIONS": "attempts:0",
            **environ,
        }
        namespaces = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
        enter = ["sh", "-c", _ENTER, "sh", _VOLUME, str(folder), name]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*namespaces, *enter, *self._as_user("run", *arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _as_user(self, *arguments: str) -> list[str]:
        environ = [f"{name}={value}" for name, value in self._environ.items()]
        become = ["setpriv", "--reuid", str(USER), "--regid", "0", "--clear-groups", "env", "-i", *environ]
        return [*become, interpreter_for(USER), "-c", _TENAX, *arguments]

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def first_process(self) -> int:
        """The pid of process 1, outside of the pod."""
        return int(Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text())

    def execute(self, *command: str) -> str:
        """Return the output of a command, as ``kubectl exec``."""
        enter = ["nsenter", "-t", str(self.first_process), "--mount", "--pid", "--uts", "--ipc"]
        done = subprocess.run([*enter, *command], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        return done.stdout + done.stderr

    def tenax(self, *arguments: str) -> str:
        return self.execute(*self._as_user(*arguments))

    def wait_for(self, text: str, count: int = 1) -> None:
        def check() -> bool:
            assert self._process.poll() is None or self.output.count(text) >= count, self.output
            return self.output.count(text) >= count

        until(check, text)

    def terminate(self) -> None:
        """Send SIGTERM, as the kubelet does."""
        os.kill(self.first_process, signal.SIGTERM)

    def wait(self) -> int:
        return self._process.wait(TIMEOUT_S)

    def close(self) -> None:
        with suppress(ValueError, ProcessLookupError, FileNotFoundError):
            os.kill(self.first_process, signal.SIGKILL)
        self.wait()
