"""The etcd program of this host: its path, and whether its version is supported.

tenax ships no etcd. It uses the program that $TORCHELASTIC_ETCD_BINARY_PATH or $TENAX_ETCD names. Otherwise it looks on
PATH, then beside the Python interpreter, where packages of a virtual environment install programs. If the program that
the user named is unusable, that is an error; there is no fallback.

Nothing here starts a process: the caller runs ``etcd --version`` and passes the output to ``judge_version``.
"""

from __future__ import annotations

import os
import re
import shutil
import sys

import msgspec

from tenax._io.helper_process import SECRET_VARIABLES, inheritable_environ

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLES = ("TORCHELASTIC_ETCD_BINARY_PATH", "TENAX_ETCD")
LEAST = (3, 4)
_HOW = f"install etcd (Debian, Ubuntu: apt-get install etcd-server), or set {VARIABLES[1]} to its path"


class EtcdUnusable(Exception):
    """This host has no usable etcd program. The message gives the cause and the next step."""


class EtcdVersion(msgspec.Struct):
    """``warning`` is a message for the user, or empty."""

    number: tuple[int, int, int]
    warning: str = ""

    def __str__(self) -> str:
        return ".".join(map(str, self.number))


def find_etcd(environ: Mapping[str, str] | None = None, beside: str = sys.executable) -> str:
    """Return the path of the program. Raises ``EtcdUnusable``."""
    environ = os.environ if environ is None else environ
    for variable in VARIABLES:
        if named := environ.get(variable, ""):
            found = shutil.which(named, path=environ.get("PATH"))
            if found is None:
                raise EtcdUnusable(f"{variable} is {named!r}, which is not an executable program; change or unset it")
            return os.path.abspath(found)
    found = shutil.which("etcd", path=environ.get("PATH")) or shutil.which("etcd", path=os.path.dirname(beside))
    if found is None:
        raise EtcdUnusable(f"found no etcd program on PATH or in {os.path.dirname(beside)}; {_HOW}")
    return os.path.abspath(found)


def judge_version(path: str, printed: str) -> EtcdVersion:
    """Parse and check the output of ``etcd --version``. Raises ``EtcdUnusable``."""
    found = re.search(r"etcd Version:\s*v?(\d+)\.(\d+)(?:\.(\d+))?", printed)
    if found is None:
        first_line = printed.strip().partition("\n")[0][:120]
        raise EtcdUnusable(f"{path} --version printed {first_line!r}; expected 'etcd Version: 3.4' or later; {_HOW}")
    version = EtcdVersion((int(found[1]), int(found[2]), int(found[3] or 0)))
    if version.number < LEAST:
        raise EtcdUnusable(f"{path} is etcd {version}; tenax needs 3.4 or later; {_HOW}")
    if (3, 5, 0) <= version.number <= (3, 5, 2):
        version.warning = (
            f"{path} is etcd {version}; upstream does not recommend 3.5.0 to 3.5.2 for production, because members "
            "may become inconsistent after a crash; use 3.4.22 or later, or 3.5.6 or later"
        )
    return version


def server_environ(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a managed etcd server.

    It excludes etcd's own variables, which act as flags and are meant for the site's own etcd; proxies, through which
    members would try to reach each other; and secrets that the server does not need.
    """
    import platform

    kept = {
        name: value
        for name, value in (inheritable_environ() if environ is None else environ).items()
        if not name.startswith("ETCD_")
        and name.lower() not in ("http_proxy", "https_proxy", "all_proxy")
        and name not in SECRET_VARIABLES
    }
    if platform.machine() in ("aarch64", "arm64"):
        kept["ETCD_UNSUPPORTED_ARCH"] = "arm64"  # 3.4 does not start there without it
    return kept
