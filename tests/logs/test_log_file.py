"""A log file on a disk that accepts only a part of what is written: a limit on the file size simulates it."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

SCRIPT = """
import resource, sys
from tenax._logs.log_file import LogFile

def room(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

log = LogFile(sys.argv[1].encode())
room(100)
log.append(b"a" * 99 + b"\\n" + b"lost\\n")
for size in (101, 110, 140):  # a mark begins to fit, and does not
    room(size)
    log.append(b"lost too\\n")
room(10_000)
log.append(b"kept\\n")
log.close()
print(log.lost_bytes)
"""


def test_a_partial_gap_mark_is_removed(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    path = tmp_path / "log"
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, check=True)
    assert ran.stdout == "32\n"
    assert path.read_bytes() == b"a" * 99 + b"\n[tenax: 32 bytes are missing here: File too large]\nkept\n"
