"""Operator command lines: usage errors are one line, and every command has a help text."""

from __future__ import annotations

import pytest

from tenax.cli.main import main

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("status", "a", "b"), "expected one run, not 2"),
        (("status", "--what"), "unknown flag '--what'; did you mean '--watch'?"),
        (("status", "--wach"), "unknown flag '--wach'; did you mean '--watch'?"),
        (("logs", "--folow"), "unknown flag '--folow'; did you mean '--follow'?"),
        (("logs", "--gen=3"), "unknown flag '--gen=3'; did you mean '--generation'?"),
        (("ps", "--jsn"), "unknown flag '--jsn'; did you mean '--json'?"),
        (("stop", "--end-point", "host"), "unknown flag '--end-point'; did you mean '--endpoint'?"),
        (("stop", "--force"), "unknown flag '--force'\n"),
        (("status", "--json=1"), "--json takes no value"),
        (("status", "--endpoint"), "--endpoint needs a value"),
        (("status", "--endpoint", "host:1"), "--endpoint needs a run id"),
        (("status", "run", "--rdzv-conf", "token=x"), "--rdzv-backend and --rdzv-conf need --endpoint HOST:PORT"),
        (("status", "run", "--endpoint", "host:99999"), "takes HOST or HOST:PORT"),
        (
            ("status", "run", "--endpoint", "host", "--rdzv-backend", "zeus"),
            "takes 'tcp' or 'etcd', not 'zeus'",
        ),
        (("status", "run", "--endpoint", "h", "--rdzv-conf", "token_file=/nowhere"), "cannot read the file"),
        (("drain",), "no node given"),
        (("stop", "--why", "x" * 1001), "--why takes at most 1000 bytes"),
        (("ps", "run"), "no arguments expected"),
    ],
)
def test_a_usage_error_is_one_line(capfd: pytest.CaptureFixture[str], words: tuple[str, ...], sentence: str) -> None:
    assert main(words) == 2
    error = capfd.readouterr().err
    assert sentence in error
    assert error.endswith(f"try: tenax {words[0]} --help\n")


@pytest.mark.parametrize("command", ["status", "ps", "stop", "drain", "restart"])
def test_every_command_has_help(capfd: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    page = capfd.readouterr().out
    assert page.startswith(f"usage: tenax {command}")
    assert f"\n  tenax {command}" in page
    assert max(map(len, page.splitlines())) <= 120
