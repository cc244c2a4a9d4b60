"""Text from files and peers is escaped before it is printed: every control and format character of Unicode."""

from __future__ import annotations

import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import msgspec
import pytest

from kit.jobs import TIMEOUT_S
from tenax._core.text import harmless, one_line
from view.test_history import agent_of_two_generations, run_of_two_nodes

OSC = "\x1b]0;owned\x07"
# A bidirectional mark, a zero-width space, a byte order mark, a tag character, an override, a line separator.
INVISIBLE = "\u061c\u200b\ufeff\U000e0041\u202e\u2028"


def test_exactly_control_and_format_characters_are_escaped() -> None:
    """Over all code points: categories Cc, Cf, Cs, Zl and Zp, except tab and newline; and reserved ones."""
    reserved = {0x2065, *range(0xFFF0, 0xFFF9), *range(0xFDD0, 0xFDF0), *range(0xE0000, 0xE1000)}
    wrong = []
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        category = unicodedata.category(character)
        expected = category in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\t\n"
        if category == "Cn":
            expected = number in reserved or number & 0xFFFE == 0xFFFE
        if (harmless(character) != character) != expected:
            wrong.append(f"U+{number:04X} {category}")
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ünïcödé \u4e2d\u6587 \U0001f600 a\u00a0b", "plain ünïcödé \u4e2d\u6587 \U0001f600 a\u00a0b"),
        ("\u061c\u200b\ufeff", "\\u061c\\u200b\\ufeff"),
        ("\U000e0041", "\\U000e0041"),
        ("a\x1b[31mb\x1b[0m\tc\n", "ab\tc\n"),
        ("\udcff", "\\udcff"),
        ("a\r\nb\rc", "a\nb\\x0dc"),
    ],
)
def test_escaped_text_is_readable(text: str, shown: str) -> None:
    """Ordinary text of any language is unchanged; colours are removed; escaping twice changes nothing."""
    assert harmless(text) == shown
    assert harmless(shown) == shown


def test_one_line_cannot_look_like_two() -> None:
    """A newline in a name or a reason does not start a new line."""
    assert one_line("host\ntenax: the run succeeded") == "host\\ntenax: the run succeeded"
    assert one_line("plain") == "plain"


def hostile_journals(folder: Path) -> None:
    """Write journals with terminal escapes in every text of the header and in some steps."""
    run_of_two_nodes(folder).close()
    agent_of_two_generations(folder).close(60.0)
    for name in ("journal.jsonl", "coordinator.jsonl"):
        path = folder / name
        header, *steps = path.read_bytes().split(b"\n")
        fields = msgspec.json.decode(header)
        fields["settings"]["run_id"] += f"\ntenax: forged {OSC}{INVISIBLE}"
        for key in ("host", "tenax", "entrypoint"):
            if key in fields:
                fields[key] += f"\ntenax: forged {OSC}{INVISIBLE}"
        path.write_bytes(b"\n".join([msgspec.json.encode(fields), *steps]))


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments",
    [
        ("replay", "logs/journal.jsonl"),
        ("replay", "logs/coordinator.jsonl"),
        ("report", "logs"),
        ("report", "--json", "logs"),
        ("timeline", "logs"),
        ("timeline", f"{OSC}{INVISIBLE}\n"),
        ("report", f"{OSC}{INVISIBLE}\n"),
        ("replay", f"{OSC}{INVISIBLE}\n"),
        ("run", "--plan", "--rdzv-id", f"{OSC}{INVISIBLE}", "train.py"),
        ("run", f"--{OSC}{INVISIBLE}", "train.py"),
        ("status", f"{OSC}{INVISIBLE}"),
        ("logs", f"{OSC}{INVISIBLE}"),
        ("stop", f"{OSC}{INVISIBLE}"),
        ("ask", f"{OSC}{INVISIBLE}"),
        (f"{OSC}{INVISIBLE}",),
    ],
    ids=lambda arguments: " ".join(map(ascii, arguments))[:60],
)
def test_commands_print_no_control_characters(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Whatever journals and arguments contain, the output neither controls the terminal nor forges a line."""
    hostile_journals(tmp_path / "logs")
    done = subprocess.run(
        [sys.executable, "-m", "tenax", *arguments], cwd=tmp_path, capture_output=True, timeout=TIMEOUT_S, check=False
    )
    printed = (done.stdout + done.stderr).decode()
    assert "Traceback" not in printed
    assert harmless(printed) == printed
    assert not re.search(r"^tenax: forged", printed, re.MULTILINE)


@pytest.mark.process
def test_the_agent_escapes_its_run_id(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    run_id = f"id{OSC}{INVISIBLE}"
    done = subprocess.run(
        [sys.executable, "-m", "tenax", "run", "--rdzv-id", run_id, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    printed = (done.stdout + done.stderr).decode()
    assert "id\\x1b]0;owned\\x07\\u061c\\u200b\\ufeff\\U000e0041" in printed
    assert harmless(printed) == printed
