"""A marked secret does not appear in the repr of a settings class, nor in anything that a run prints or writes."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tenax
from kit.addresses import own_endpoint
from kit.processes import on_linux
from tenax.launcher.api import LaunchConfig
from tenax.rendezvous.api import RendezvousParameters
from tenax.rendezvous.c10d_rendezvous_backend import create_backend

pytestmark = pytest.mark.process

MARK = "marked0secret0of0tests"
URL = f"otel:http://me:{MARK}@collector:4318"
_SECRET = re.compile(r"^(secret|password|token|conf)$")
_MAY_HOLD_AN_ADDRESS = re.compile(r"^(trace|metrics|event_log_handler|rdzv_endpoint)$")
_PROGRAMS = re.compile(
    r"\.(hook|warm|testing|compat|_processes\.\w+_main|_logs\.writer_main)\b|__main__|tenax_template"
)
_NOT_SECRET = {"Snapshot"}  # its token is a version of the rendezvous state


def structs() -> Iterator[type[msgspec.Struct]]:
    for module in pkgutil.walk_packages(tenax.__path__, "tenax."):
        if not _PROGRAMS.search(module.name):
            with suppress(ModuleNotFoundError):  # an optional third-party package
                importlib.import_module(module.name)
    left = [msgspec.Struct]
    while left:
        for kind in left.pop().__subclasses__():
            left.append(kind)
            if kind.__module__.startswith("tenax."):
                yield kind


def marked(kind: type[msgspec.Struct]) -> Any:
    """Return an instance with the mark in its secrets; None if it has no secret. Other fields are None."""
    values: dict[str, Any] = {}
    for name in kind.__struct_fields__:
        if _SECRET.match(name):
            values[name] = f"token={MARK}" if name == "conf" else MARK
        elif _MAY_HOLD_AN_ADDRESS.match(name):
            values[name] = URL
        elif name == "rdzv_configs":
            values[name] = {"token": MARK, "password": MARK}
    if not values:
        return None
    names, defaults = kind.__struct_fields__, kind.__struct_defaults__  # of the last fields
    given = dict(zip(reversed(names), reversed(defaults), strict=False))
    required = [name for name in names if given.get(name, msgspec.NODEFAULT) is msgspec.NODEFAULT]
    return kind(**{**dict.fromkeys(required), **values})


def test_the_repr_of_settings_hides_secrets() -> None:
    """``repr()`` and ``str()`` end up in logs and tracebacks."""
    seen = []
    for kind in structs():
        if kind.__name__ in _NOT_SECRET or (instance := marked(kind)) is None:
            continue
        seen.append(kind.__name__)
        assert MARK not in repr(instance) + str(instance), kind
    expected = {"Options", "JobSpec", "TcpSettings", "EtcdEngineSettings", "EtcdSettings", "Leader", "JobSelector"}
    assert expected <= set(seen), "the classes must be found, so that a renamed field does not pass"
    config = LaunchConfig(
        1,
        2,
        1,
        rdzv_configs={"token": MARK, "password": MARK, "token_file": "path"},
        metrics_cfg={"handlers": URL},
        trace=URL,
        event_log_handler=URL,
    )
    params = RendezvousParameters("tcp", "host", "run", 1, 2, token=MARK, password=MARK)
    for instance in (config, params):
        assert MARK not in repr(instance) + str(instance)
    assert "'token_file': 'path'" in repr(config), "the name of a file is not secret"
    with pytest.raises(ValueError, match="would have no effect") as raised:
        create_backend(params)
    assert MARK not in str(raised.value)


WRONG_USAGE: dict[str, list[str]] = {
    "a trace without a handler": ["--trace", f"http://me:{MARK}@collector", "t.py"],
    "a trace to a wrong address": ["--dry-run", "--trace", f"otel:me:{MARK}@collector", "t.py"],
    "metrics to a wrong address": ["--dry-run", "--metrics", f"otel:me:{MARK}@collector", "t.py"],
    "a secret on the command line": ["--nnodes=2", "--rdzv-endpoint=h", f"--rdzv-conf=token={MARK}", "t.py"],
    "an incomplete setting": ["--nnodes=2", "--rdzv-endpoint=h", f"--rdzv-conf=token={MARK},half", "t.py"],
    "a password in an endpoint": ["--nnodes=2", "--rdzv-backend=etcd", f"--rdzv-endpoint=http://me:{MARK}@h", "t.py"],
    "a misspelt flag": [f"--rdzv-cnof=token={MARK}", "t.py"],
    "a dry run": ["--dry-run", "--nnodes=2", "--rdzv-endpoint=h", "--trace", URL, "--metrics", URL, "t.py"],
}


def tenax_run(args: list[str], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tenax", "run", *args],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("args", WRONG_USAGE.values(), ids=WRONG_USAGE.keys())
def test_usage_errors_and_dry_runs_hide_secrets(args: list[str], tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    done = tenax_run(args, tmp_path, TENAX_RDZV_TOKEN=MARK)
    assert MARK not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


WORKER = """
import os
print(dict(os.environ))
me, seen = os.getpid(), []
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read()
    except OSError:
        continue
    if os.environ["MARKED_RUN"].encode() in environ:
        is_agent = b"\\0run\\0" in command and b"tenax" in command  # which was given it
        seen.append((pid, command, b"" if is_agent else environ))
with open(os.environ["MARKED_RUN"] + os.environ["RANK"], "w") as file:
    file.write("\\n".join(map(repr, seen)))
if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise RuntimeError("the first attempt fails")
"""


@on_linux
@pytest.mark.parametrize("source", ["variable", "file"])
def test_output_files_and_processes_of_a_run_do_not_contain_the_secret(source: str, tmp_path: Path) -> None:
    """Consoles of both nodes, logs, journals, reports, error files, and command lines and environments of all processes
    except the agents, which get it in their environment."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "t.py").write_text(WORKER)
    environ = {**os.environ, "MARKED_RUN": str(folder / "seen"), "TMPDIR": str(folder)}
    conf = "last_call_timeout=0"
    if source == "variable":
        environ["TENAX_RDZV_TOKEN"] = MARK
        environ["TENAX_ETCD_PASSWORD"] = MARK
    else:
        secret = tmp_path / "secret"
        secret.write_text(MARK)
        secret.chmod(0o600)
        conf += f",token_file={secret}"
    flags = ["--nnodes=2", "--max-restarts=1", f"--rdzv-endpoint={own_endpoint()}", f"--rdzv-conf={conf}", "--tee=3"]
    agents = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tenax",
                "run",
                *flags,
                f"--log-dir=logs{number}",
                f"--report=r{number}.json",
                "t.py",
            ],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for number in range(2)
    ]
    printed = [agent.communicate(timeout=100)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], printed
    assert MARK.encode() not in b"".join(printed)
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"journal.jsonl", "coordinator.jsonl", "r0.json", "seen0", "seen1", "stdout.log"} <= names
    assert "tenax-keeper" in (folder / "seen0").read_text(), "helpers must be included"
    for path in files:
        assert MARK.encode() not in path.read_bytes(), path
