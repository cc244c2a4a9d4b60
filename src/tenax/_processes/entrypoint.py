"""Entrypoints: what a worker runs, a command or a Python function.

Each turns a local rank and an environment into a ``Launch`` and collects the return value after the worker exits.
"""

from __future__ import annotations

import os

from tenax._io.interfaces import Launch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from tenax._processes.function_worker import ReturnBarrier
    from tenax._processes.keeper import KeeperProcess

LOCAL_RANK_MACRO = "${local_rank}"
START_METHODS = ("spawn", "fork", "forkserver")


class CommandEntrypoint:
    """A program and its arguments. Only ``${local_rank}`` is substituted in arguments."""

    can_survive = True

    def __init__(
        self,
        argv_by_rank: Mapping[int, Sequence[object]],
        name: str,
        *,
        wrap_env: Callable[[dict[str, str]], dict[str, str]] = lambda env: env,
    ) -> None:
        self.name = name
        self._argv_by_rank = argv_by_rank
        self._wrap_env = wrap_env
        self._succeeded: set[int] = set()

    def keeper(self) -> KeeperProcess:
        from tenax._processes.keeper import KeeperProcess

        return KeeperProcess()

    def launch(self, local_rank: int, env: dict[str, str]) -> Launch:
        self._succeeded.discard(local_rank)
        argv = [str(word).replace(LOCAL_RANK_MACRO, str(local_rank)) for word in self._argv_by_rank[local_rank]]
        return Launch(env=self._wrap_env(env), argv=argv)

    def collect(self, local_rank: int, exit_code: int) -> str:
        if exit_code == 0:
            self._succeeded.add(local_rank)
        return ""

    def return_values(self) -> dict[int, Any]:
        return dict.fromkeys(sorted(self._succeeded))

    def release(self, local_rank: int) -> None:
        """A command holds nothing ..."""

    def end_wait(self) -> None:
        """... and does not wait for other workers."""

    close = end_wait


class FunctionEntrypoint:
    """A function, its arguments by local rank, and the start method of its process."""

    can_survive = False  # it returns a value, and waits for the others to return, once

    def __init__(
        self,
        function: Callable[..., Any],
        args_by_rank: Mapping[int, tuple[Any, ...]],
        *,
        wrap: Callable[..., Any],
        start_method: str = "spawn",
    ) -> None:
        if start_method not in START_METHODS:
            raise ValueError(f"start_method is {start_method!r}; expected one of {', '.join(START_METHODS)}")
        self.name = getattr(function, "__qualname__", type(function).__name__)
        self._function = function
        self._args_by_rank = args_by_rank
        self._wrap = wrap
        self._method = start_method
        self._payloads: dict[int, int] = {}
        self._results: dict[int, int] = {}
        self._values: dict[int, Any] = {}
        self._barrier: ReturnBarrier | None = None  # of the generation that is running
        self._launched: set[int] = set()  # local ranks that have inherited it

    def keeper(self) -> KeeperProcess:
        from tenax._processes.keeper import KeeperProcess

        if self._method == "fork":
            return KeeperProcess(call=self._run_inherited)
        return KeeperProcess("tenax._processes.forkserver_main") if self._method == "forkserver" else KeeperProcess()

    def _run_inherited(self, spec: dict[str, Any]) -> None:
        """Run in a worker forked from a copy of the agent, with function and arguments in memory."""
        from multiprocessing import set_start_method

        from tenax._processes import function_worker as worker

        set_start_method(self._method, force=True)  # for processes of the worker, as in a multiprocessing.Process
        args = self._args_by_rank[spec["local_rank"]]
        result = spec["placed"][worker.ANY_RESULT_DESCRIPTOR]
        barrier = spec["placed"][worker.ANY_BARRIER_DESCRIPTOR]
        worker.exit_like_a_program(lambda: worker.deliver(self._wrap, self._function, args, result, barrier))

    def launch(self, local_rank: int, env: dict[str, str]) -> Launch:
        from tenax._processes import function_worker as worker

        self._values.pop(local_rank, None)
        self._close(self._results, local_rank)
        result = self._results[local_rank] = worker.anonymous_file("tenax-result")
        if self._barrier is None or local_rank in self._launched:  # a rank that is launched again: the next generation
            self._close_barrier()
            self._barrier = worker.ReturnBarrier(len(self._args_by_rank))
        self._launched.add(local_rank)
        barrier = self._barrier.descriptor
        if self._method == "fork":  # the worker inherits the agent's open files, and none may be replaced
            descriptors = {worker.ANY_RESULT_DESCRIPTOR: result, worker.ANY_BARRIER_DESCRIPTOR: barrier}
        else:
            descriptors = {worker.RESULT_DESCRIPTOR: result, worker.BARRIER_DESCRIPTOR: barrier}
            payload = self._payloads[local_rank] = worker.anonymous_file("tenax-payload")
            args = self._args_by_rank[local_rank]
            descriptors.update(worker.write_payload(payload, self._wrap, self._function, args, self._method))
            descriptors[worker.PAYLOAD_DESCRIPTOR] = payload
        return Launch(env=env, argv=_worker_argv() if self._method == "spawn" else None, descriptors=descriptors)

    def release(self, local_rank: int) -> None:
        self._close(self._payloads, local_rank)

    def collect(self, local_rank: int, exit_code: int) -> str:
        from tenax._processes.function_worker import ResultUnreadable, has_result, read_result

        result = self._results.get(local_rank) if exit_code == 0 else None
        if self._barrier is not None:
            if result is not None and not has_result(result):
                self._barrier.arrive()
            else:  # it failed; or it waited at the barrier, which is then already open
                self._barrier.open()
        try:
            if result is not None:
                self._values[local_rank] = read_result(result)
        except ResultUnreadable as unreadable:
            return str(unreadable)
        finally:
            self._close(self._results, local_rank)
        return ""

    def end_wait(self) -> None:
        if self._barrier is not None:
            self._barrier.open()

    def return_values(self) -> dict[int, Any]:
        return dict(sorted(self._values.items()))

    def close(self) -> None:
        self._close_barrier()
        for held in (self._payloads, self._results):
            for local_rank in list(held):
                self._close(held, local_rank)

    def _close_barrier(self) -> None:
        self._launched.clear()
        if self._barrier is not None:
            self._barrier.close()
            self._barrier = None

    @staticmethod
    def _close(descriptors: dict[int, int], local_rank: int) -> None:
        descriptor = descriptors.pop(local_rank, None)
        if descriptor is not None:
            os.close(descriptor)


def _worker_argv() -> list[str]:
    from multiprocessing import spawn, util

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = "import sys; sys.path.append(sys.argv.pop()); from tenax._processes.function_worker import main; main()"
    flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [os.fsdecode(spawn.get_executable()), *flags, "-c", code, root]
