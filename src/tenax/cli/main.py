"""The console script ``tenax``: dispatches to one command and imports only what that command needs."""

from __future__ import annotations

import gc
import os
import sys
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# The module of each command. It has a function with the command's name, and its help page: ``stop``, ``STOP_USAGE``.
SUBCOMMANDS = {
    **{name: name for name in ("start", "replay", "ask", "status", "ps", "logs", "stacks")},
    **dict.fromkeys(("stop", "drain", "restart"), "operator_commands"),
    **dict.fromkeys(("timeline", "report"), "journal_commands"),
    "completion": "completion",
}
COMMANDS = ("run", *SUBCOMMANDS, "version", "help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code. ``argv`` is passed by programs that call this as a function."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv is None:
            _keep_interrupts(args)
        return _dispatch(args)
    except KeyboardInterrupt:  # before the launcher installs its handlers, or in a command that installs none
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
        bug = "this is a bug in tenax, not in your script; please report it with the traceback above"
        print(f"tenax: {bug}", file=sys.stderr)
        return INTERNAL_ERROR


def _dispatch(args: list[str]) -> int:
    command, rest = (args[0], args[1:]) if args else ("help", [])
    if command == "run":
        return _run(rest)
    if command in SUBCOMMANDS:
        from importlib import import_module

        from tenax.cli.command import run_subcommand

        module = import_module(f"tenax.cli.{SUBCOMMANDS[command]}")
        return run_subcommand(command, rest, getattr(module, f"{command.upper()}_USAGE"), getattr(module, command))
    if command in ("version", "--version", "-V"):
        from tenax import __version__

        print(f"tenax {__version__}")
        return 0
    if command in ("help", "--help", "-h"):
        return _help(rest)
    if command.startswith("-") or command.endswith(".py") or os.path.exists(command):
        import shlex

        return _reject(command, f"did you mean: tenax run {shlex.join(args)}")
    return _reject(command, _similar_command(command))


def _reject(command: str, advice: str) -> int:
    from tenax._failures.exit_codes import WRONG_USAGE
    from tenax.cli.run import print_stderr

    print_stderr(f"tenax: unknown command {command!r}; {advice}\ntry: tenax help")
    return WRONG_USAGE


def _keep_interrupts(args: list[str]) -> None:
    """Lose no Ctrl-C during the start. Raises KeyboardInterrupt if Python has already discarded one.

    Until the agent handles signals, SIGINT kills this process directly: a KeyboardInterrupt may be raised in code that
    discards exceptions (a finalizer, a callback from C), and the run would start anyway.
    """
    import _signal  # type: ignore[import-not-found]

    # Python prints and discards an interrupt that arrives while it determines the type of its script file.
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        raise KeyboardInterrupt
    if args[:1] == ["run"] and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def _run(args: list[str]) -> int:
    import _signal  # `signal` is itself a slow import

    if os.getpid() == 1:
        from tenax._processes.container_init import run_below_init

        run_below_init()
    has_collector = gc.isenabled()
    gc.disable()  # during the start: what is created then is kept until the process exits

    def resume_collector() -> None:
        if has_collector:
            gc.freeze()  # later collections skip what the start has created
            gc.enable()

    try:
        # The initialization of an extension module may discard an interrupt and leave the module half initialized.
        before = _signal.pthread_sigmask(_signal.SIG_BLOCK, {_signal.SIGINT})
        try:
            _preload(args)
            from tenax.cli.run import run_command
        finally:
            _signal.pthread_sigmask(_signal.SIG_SETMASK, before)
        return run_command(args, os.environ, before_run=resume_collector)
    finally:
        resume_collector()


def _preload(args: list[str]) -> None:
    """Start the keeper in parallel with the imports, which take most of the time before the first worker runs."""
    if not {"-h", "--help", "--dry-run", "--dry_run"}.intersection(args):
        from tenax._io.helper_process import start_helper_ahead

        # The keeper exits when this end of its channel closes, whatever becomes of this command line. Only the keeper
        # is started early, because the first worker waits for it. The log writer would only compete with the imports.
        start_helper_ahead("tenax._processes.keeper_main", "tenax-keeper")
    _import_msgspec()


class _Deferred(ModuleType):
    """Stands for a module until one of its attributes is used."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        __import__(self.__name__)
        return getattr(sys.modules[self.__name__], name)


def _import_msgspec() -> None:
    """Import msgspec without what tenax does not use of it, which takes longer than the rest.

    typing_extensions, which msgspec imports if it is installed (as it is with torch), is hidden. The other modules are
    imported when msgspec uses them. For other code, all of them work as usual.
    """
    import _datetime  # type: ignore[import-not-found]
    import typing

    deferred = [_Deferred(name) for name in ("platform", "textwrap", "msgspec.inspect", "msgspec.toml", "msgspec.yaml")]
    deferred[0].system = lambda: os.uname().sysname  # type: ignore[attr-defined] # used by `uuid`
    substitutes: dict[str, Any] = {module.__name__: module for module in deferred}
    substitutes.update(typing_extensions=None, datetime=_datetime)  # `datetime` has the classes of `_datetime`
    for name in substitutes.keys() & sys.modules.keys():
        del substitutes[name]
    sys.modules.update(substitutes)
    forward_ref = typing.ForwardRef
    if sys.version_info >= (3, 11):  # msgspec only tests for an argument, which makes Python initialize `ast`
        typing.ForwardRef = lambda *_, **__: None  # type: ignore[assignment, misc]
    import msgspec  # noqa: F401

    typing.ForwardRef = forward_ref  # type: ignore[misc]
    for name in substitutes:
        sys.modules.pop(name, None)


def _help(args: list[str]) -> int:
    if args and args[0] in ("run", *SUBCOMMANDS):
        return _dispatch([args[0], "--help"])
    if args and args[0] not in COMMANDS and not args[0].startswith("-"):
        return _reject(args[0], _similar_command(args[0], "help "))
    from tenax.cli.help import OVERVIEW, print_help

    return print_help(OVERVIEW)


def _similar_command(command: str, before: str = "") -> str:
    import difflib

    close = difflib.get_close_matches(command, COMMANDS, n=1)
    return f"did you mean 'tenax {before}{close[0]}'?" if close else f"commands: {', '.join(COMMANDS)}"
