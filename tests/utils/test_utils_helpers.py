"""The helpers of tenax.utils: variables, ports, macros, loggers, the state of a process."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys

import pytest

from kit.processes import on_linux
from tenax.utils import get_env_variable_or_raise, get_socket_with_port, macros
from tenax.utils.distributed import get_free_port
from tenax.utils.process_state import is_uninterruptible_state, read_proc_state


def ran(code: str, **env: str) -> str:
    """Return what a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.process
def test_a_set_variable_is_returned_even_if_it_is_empty() -> None:
    code = "from tenax.utils import get_env_variable_or_raise as get; print([get('A_NAME'), get('NOTHING_IN_IT')])"
    assert ran(code, A_NAME="text", NOTHING_IN_IT="") == "['text', '']"


def test_the_error_names_a_missing_variable() -> None:
    with pytest.raises(ValueError, match="NOBODY_SETS_THIS is required, but not set"):
        get_env_variable_or_raise("NOBODY_SETS_THIS")


def test_the_socket_listens_on_this_host() -> None:
    with get_socket_with_port() as listener, socket.socket(listener.family) as client:
        client.connect(listener.getsockname()[:2])


def test_a_free_port_can_be_bound() -> None:
    port = get_free_port()
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port


def test_only_the_macro_is_replaced() -> None:
    """Double dollars, other braces and values that are not strings are unchanged."""
    args = ["--rank=${local_rank}", "a$$b", "${HOME}", "$local_rank", 7, "${local_rank}${local_rank}"]
    assert macros.substitute(args, "3") == ["--rank=3", "a$$b", "${HOME}", "$local_rank", 7, "33"]
    assert macros.local_rank == "${local_rank}"


def test_the_macro_is_replaced_in_the_arguments_of_workers() -> None:
    from tenax._processes.entrypoint import LOCAL_RANK_MACRO

    assert macros.local_rank == LOCAL_RANK_MACRO


@pytest.mark.process
@pytest.mark.parametrize(
    ("value", "level"),
    [(None, "WARNING"), ("", "WARNING"), ("DEBUG", "DEBUG"), ("info", "INFO"), ("40", "ERROR")],
)
def test_loglevel_sets_the_level(value: str | None, level: str) -> None:
    """A name in any case or a number; the default is WARNING."""
    code = "import logging; from tenax.utils.logging import get_logger as g; print(logging.getLevelName(g('a').level))"
    env = {key: value for key, value in os.environ.items() if key != "LOGLEVEL"}
    if value is not None:
        env["LOGLEVEL"] = value
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == level


@pytest.mark.process
def test_an_unknown_level_is_rejected_with_a_message() -> None:
    code = "from tenax.utils.logging import get_logger\ntry: get_logger()\nexcept ValueError as error: print(error)"
    assert "LOGLEVEL is 'LOUD'; expected a name" in ran(code, LOGLEVEL="LOUD")


def test_a_logger_without_a_name_has_that_of_its_module() -> None:
    from tenax.utils.logging import get_logger

    assert get_logger().name == __name__
    assert get_logger("own").name == "own"
    assert isinstance(get_logger(), logging.Logger)


def test_the_default_level() -> None:
    from tenax.utils.log_level import get_log_level

    assert get_log_level() == "WARNING"


@pytest.mark.process
@on_linux
def test_the_state_of_a_process_is_read() -> None:
    """Running, a zombie with any name, and none for a process that is gone."""
    assert read_proc_state(os.getpid()) == "R"
    with subprocess.Popen(["/bin/sh", "-c", "read _; echo ') D ' > /proc/self/comm"], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert read_proc_state(child.pid) == "Z"
    assert read_proc_state(child.pid) is None


@pytest.mark.parametrize(("state", "is_stuck"), [("D", True), ("D+", True), ("S", False), ("", False), (None, False)])
def test_only_d_is_uninterruptible(state: str | None, is_stuck: bool) -> None:
    assert is_uninterruptible_state(state) is is_stuck


@pytest.mark.process
def test_importing_utils_imports_almost_nothing() -> None:
    """Neither socket nor logging nor torch."""
    heavy = "['torch', 'socket', 'logging', 'msgspec', 'typing']"
    code = f"import sys; seen = set(sys.modules); import tenax.utils; print(set({heavy}) & set(sys.modules) - seen)"
    assert ran(code) == "set()"
