"""Operator command lines: usage errors are one line, and every command has a help text."""

from __future__ import annotations

import pytest

from tenax.cli.main import main

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("status", "a", "b"), "one run at a time, not 2"),
        (("status", "--what"), "there is no flag '--what'; did you mean '--watch'?"),
        (("status", "--wach"), "there is no flag '--wach'; did you mean '--watch'?"),
        (("logs", "--folow"), "there is no flag '--folow'; did you mean '--follow'?"),
        (("logs", "--gen=3"), "there is no flag '--gen=3'; did you mean '--generation'?"),
        (("ps", "--jsn"), "there is no flag '--jsn'; did you mean '--json'?"),
        (("stop", "--end-point", "host"), "there is no flag '--end-point'; did you mean '--endpoint'?"),
        (("stop", "--force"), "there is no flag '--force'\n"),
        (("status", "--json=1"), "--json takes no value"),
        (("status", "--endpoint"), "--endpoint needs a value"),
        (("status", "--endpoint", "host:1"), "at an endpoint the run must be named"),
        (("status", "run", "--rdzv-conf", "token=x"), "add --endpoint HOST:PORT"),
        (("status", "run", "--endpoint", "host:99999"), "takes HOST or HOST:PORT"),
        (("status", "run", "--endpoint", "host", "--rdzv-backend", "zeus"), "--rdzv-backend is 'zeus'"),
        (("status", "run", "--endpoint", "h", "--rdzv-conf", "token_file=/nowhere"), "cannot read the file"),
        (("drain",), "say which node is to leave"),
        (("stop", "--why", "x" * 1001), "--why takes at most 1000 bytes"),
        (("ps", "run"), "it lists this host"),
    ],
)
def test_a_usage_error_is_one_line(capfd: pytest.CaptureFixture[str], words: tuple[str, ...], sentence: str) -> None:
    assert main(words) == 2
    said = capfd.readouterr().err
    assert sentence in said
    assert said.endswith(f"try: tenax {words[0]} --help\n")


@pytest.mark.parametrize("command", ["status", "ps", "stop", "drain", "restart"])
def test_every_command_has_help(capfd: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    page = capfd.readouterr().out
    assert page.startswith(f"usage: tenax {command}")
    assert f"\n  tenax {command}" in page
    assert max(map(len, page.splitlines())) <= 120
