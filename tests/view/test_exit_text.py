"""Descriptions of exit codes and signals."""

from __future__ import annotations

import signal

import pytest

from tenax._view.exit_text import describe_exit, describe_signal, signal_name


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [
        (0, "exited with code 0"),
        (1, "exited with code 1"),
        (7, "exited with code 7"),
        (127, "exited with code 127 (command not found)"),
        (126, "exited with code 126 (found but not executable)"),
        (137, "exited with code 137 (a shell's code for a command killed by SIGKILL)"),
        (255, "exited with code 255"),
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV (invalid memory access)"),
        (-15, "was killed by SIGTERM"),
    ],
)
def test_an_exit_code_is_described(exit_code: int, text: str) -> None:
    """Negative codes are signals."""
    assert describe_exit(exit_code) == text


def test_every_number_can_be_described() -> None:
    """No number raises an exception."""
    for number in range(-200, 1000):
        assert signal_name(number)
        assert describe_signal(number)
        assert describe_exit(number)
    assert signal_name(9) == "SIGKILL"
    assert signal_name(777) == "signal 777"


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="this system has no real-time signals")
def test_a_real_time_signal_is_named_by_its_distance() -> None:
    """Only the first and the last of them have names."""
    assert signal_name(signal.SIGRTMIN + 3) == "SIGRTMIN+3"
