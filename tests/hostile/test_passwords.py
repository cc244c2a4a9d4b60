"""Passwords in addresses of the user are masked in errors, plans and representations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kit.jobs import TIMEOUT_S
from tenax._core.text import without_passwords
from tenax.launcher import LaunchConfig
from tenax.metrics._opentelemetry import otlp_address

SECRET = "hunter2"
ADDRESS = f"http://user:{SECRET}@host:4318"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"'{ADDRESS}/v1'", "'http://***@host:4318/v1'"),
        (f"ftp://:{SECRET}@@h and https://{SECRET}@h", "ftp://***@h and https://***@h"),
        ("http://host/a@b", "http://host/a@b"),
        ("a@b", "a@b"),
    ],
)
def test_the_user_and_the_password_of_an_address_are_masked(text: str, shown: str) -> None:
    """Everything before the host; other text is unchanged."""
    assert without_passwords(text) == shown


@pytest.mark.process
@pytest.mark.parametrize(
    "flags",
    [
        ("--trace", ADDRESS),
        ("--trace", f"otel:ftp://user:{SECRET}@host"),
        ("--metrics", f"otel:ftp://user:{SECRET}@host"),
        ("--metrics", ADDRESS),
        ("--rdzv-endpoint", ADDRESS, "--nnodes", "2"),
        ("--rdzv-backend", "etcd", "--rdzv-endpoint", ADDRESS, "--nnodes", "2"),
        ("--plan", "--trace", f"otel:{ADDRESS}"),
    ],
)
def test_commands_do_not_print_a_password(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Neither in the error for an invalid flag nor in the plan of a run."""
    (tmp_path / "train.py").write_text("")
    command = [sys.executable, "-m", "tenax", "run", "--dry-run", *flags, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert SECRET not in done.stdout + done.stderr


def test_values_do_not_show_a_password() -> None:
    """In Python: the configuration, and the error for an invalid address."""
    config = LaunchConfig(1, 1, 1, rdzv_endpoint=ADDRESS)
    assert SECRET not in repr(config)
    with pytest.raises(ValueError, match="invalid endpoint") as raised:
        otlp_address(f"ftp://user:{SECRET}@host", "traces", {})
    assert SECRET not in str(raised.value)
