"""A Python that has imported torch. Programs run in forks of one process, because the import takes two seconds.

Fixture: ``torch_python`` is one such process for a whole test process; it starts when a test first uses it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

# Imports nothing of tenax and of torch.distributed.elastic: which of them comes first matters to tenax.compat.
_MAIN = """
import json, os, socket, sys
import torch

def next_program(requests):
    "Return in a fork for every request; the parent sends the exit code."
    while True:
        data, files, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not data:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            requests.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
        for file in files:
            os.close(file)
        if pid == 0:
            return json.loads(data)
        requests.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())

program = next_program(socket.socket(fileno=int(sys.argv[1])))
os.environ.clear()
os.environ.update(program["environ"])
sys.argv[:] = program["argv"]
if program["path"]:
    sys.path[0], __file__ = os.path.dirname(program["path"]), program["path"]
exec(compile(program["code"], program["path"] or "<string>", "exec"))
"""


class TorchPython:
    def __init__(self) -> None:
        self._requests, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(its_end.fileno())],
                pass_fds=[its_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # its programs can be killed with it
            )

    def run(
        self, *arguments: str, environ: Mapping[str, str] = os.environ, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run ``-c CODE`` or the file of a script, with arguments, as ``python`` would. ``PYTHON…`` has no effect."""
        is_code = arguments[0] == "-c"
        code = arguments[1] if is_code else Path(arguments[0]).read_text()
        argv = ["-c", *arguments[2:]] if is_code else list(arguments)
        program = {"code": code, "path": "" if is_code else arguments[0], "argv": argv, "environ": dict(environ)}
        with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin)
            given.seek(0)
            files = [each.fileno() for each in (given, out, err)]
            socket.send_fds(self._requests, [json.dumps(program).encode()], files)
            exit_code = int(self._requests.recv(100))
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(arguments, exit_code, out.read().decode(), err.read().decode())

    def close(self) -> None:
        self._requests.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="session")
def torch_python() -> Iterator[TorchPython]:
    python = TorchPython()
    yield python
    python.close()
