"""``tenax``: which command is meant. Imports only what that command needs."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Where each command is, besides those that this file knows itself.
_ELSEWHERE = {
    "replay": ("replay", "replay_command"),
    "ask": ("ask", "ask_command"),
    "status": ("status", "status_command"),
    "ps": ("ps", "ps_command"),
    "logs": ("logs", "logs_command"),
    "stop": ("operate", "stop_command"),
    "drain": ("operate", "drain_command"),
    "restart": ("operate", "restart_command"),
    "timeline": ("timeline", "timeline_command"),
    "report": ("report", "report_command"),
}
COMMANDS = ("run", *_ELSEWHERE, "version", "help")


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code. With ``argv``, this is a call inside another program."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv is None:
            _honour_interrupts(words)
        return _obey(words)
    except KeyboardInterrupt:  # before the launcher has taken over the signals, or in a command that takes none over
        from tenax._failures.exit_codes import CANCELLED

        return CANCELLED
    except Exception as error:
        import traceback

        from tenax._failures.exit_codes import BROKEN, INTERNAL_ERROR
        from tenax._io.helper_process import HelperUnavailable

        if isinstance(error, HelperUnavailable):
            print(f"tenax: {error}", file=sys.stderr)
            return BROKEN

        traceback.print_exc()
        print(
            "tenax: this is a bug in tenax, not in your script; please report it with the lines above", file=sys.stderr
        )
        return INTERNAL_ERROR


def _obey(words: list[str]) -> int:
    command, rest = (words[0], words[1:]) if words else ("help", [])
    if command == "run":
        with _Undisturbed():
            _get_ready(rest)
            from tenax.cli.run import run_command

        return run_command(rest, os.environ)
    if command in _ELSEWHERE:
        return _elsewhere(command, rest)
    if command in ("version", "--version", "-V"):
        return _version()
    if command in ("help", "--help", "-h"):
        return _help(rest)
    return _refuse(_unknown(command, words))


def _refuse(sentence: str) -> int:
    from tenax._failures.exit_codes import WRONG_USAGE
    from tenax.cli.run import tell

    tell(f"tenax: {sentence}\ntry: tenax help")
    return WRONG_USAGE


def _elsewhere(command: str, words: list[str]) -> int:
    from importlib import import_module

    module, name = _ELSEWHERE[command]
    return int(getattr(import_module(f"tenax.cli.{module}"), name)(words))


def _honour_interrupts(words: list[str]) -> None:
    """Lose no Ctrl-C during the start. Raises KeyboardInterrupt if Python has discarded one already.

    Until the agent handles signals, SIGINT ends this process directly: a KeyboardInterrupt may be raised in code that
    discards exceptions (a finalizer, a callback of C code), and the run would start all the same.
    """
    import _signal  # type: ignore[import-not-found]

    # Python prints and discards an interrupt that arrives while it checks what kind of file its script is.
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        raise KeyboardInterrupt
    if words[:1] == ["run"] and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


class _Undisturbed:
    """Holds a Ctrl-C back until the imports are done.

    The initialisation of an extension module may swallow the interrupt and leave the module half made, to crash later.
    """

    def __enter__(self) -> None:
        # Not `signal`, which is itself one of the imports that take their time.
        import _signal

        self._signals = _signal
        self._before = _signal.pthread_sigmask(_signal.SIG_BLOCK, {_signal.SIGINT})

    def __exit__(self, *_: object) -> None:
        self._signals.pthread_sigmask(self._signals.SIG_SETMASK, self._before)


def _get_ready(words: list[str]) -> None:
    """Make the most of the time that imports take: most of what passes before the first worker runs."""
    if not {"-h", "--help", "--dry-run", "--dry_run"}.intersection(words):
        from tenax._io.helper_process import start_helper_ahead

        # Whatever comes of this command line, it ends when our end of its channel closes. Only the keeper: the first
        # worker waits for it. The scribe, for which nobody waits, would only take a core away from the imports.
        start_helper_ahead("tenax._processes.keeper_main", "tenax-keeper")
    _import_msgspec()


def _import_msgspec() -> None:
    """Where typing_extensions is installed (wherever torch is), msgspec imports it, for nothing that is used here, and
    that costs as much as msgspec itself. Hidden from msgspec, not from anybody who comes later."""
    if "typing_extensions" not in sys.modules:
        sys.modules["typing_extensions"] = None  # type: ignore[assignment]
        import msgspec  # noqa: F401

        del sys.modules["typing_extensions"]


def _version() -> int:
    from tenax import __version__

    print(f"tenax {__version__}")
    return 0


def _help(words: list[str]) -> int:
    if words and words[0] in ("run", *_ELSEWHERE):
        return _obey([words[0], "--help"])
    if words and words[0] not in COMMANDS and not words[0].startswith("-"):
        return _refuse(_no_command(words[0], "help "))
    from tenax.cli.help import OVERVIEW
    from tenax.cli.run import print_page

    return print_page(OVERVIEW)


def _unknown(command: str, words: list[str]) -> str:
    if command.startswith("-") or command.endswith(".py") or os.path.exists(command):
        import shlex

        return f"there is no command {command!r}; did you mean: tenax run {shlex.join(words)}"
    return _no_command(command)


def _no_command(command: str, before: str = "") -> str:
    from tenax.cli.near_names import near_command

    near = near_command(command, COMMANDS)
    if near:
        return f"there is no command {command!r}; did you mean 'tenax {before}{near}'?"
    return f"there is no command {command!r}; there are {', '.join(COMMANDS)}"
