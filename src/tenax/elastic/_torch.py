"""What is done with torch, if the script has imported it: groups, tensors, hooks. torch is never imported here.

Public functions of torch, with these exceptions, all of torch 2.x and each used only if it exists: the groups of a
process (``distributed_c10d._world``), their devices (``_device_types``), ``_abort_process_group`` for NCCL, and the
reducer of ``DistributedDataParallel``, whose hooks would otherwise act in the next generation.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from tenax.elastic._state import State

_CHUNK = 64 << 20  # bytes of one message
_replicas: list[Any] = []  # weak references to the DistributedDataParallel objects of this generation


def _torch() -> Any:
    return sys.modules.get("torch")


def configure() -> None:
    """NCCL's watchdog must not end a process that survives: it is aborted at the end of the generation."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"


def prepare_cuda() -> None:
    """Create the CUDA context of this worker's device, and load cuBLAS and the first kernels.

    For ``tenax run --standby-setup tenax.elastic:prepare_cuda``: each standby does this before it is needed. The device
    is the one with the number ``LOCAL_RANK``, modulo the number of devices. Random generators are not used.
    """
    torch = _torch()
    if torch is None:
        raise RuntimeError("torch is not preloaded; name it with --preload")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    weight = torch.ones(64, 64, device=device, requires_grad=True)
    (weight @ weight).relu().square().mean().backward()
    torch.cuda.synchronize()


# --- hooks ------------------------------------------------------------------------------------------------------------


def before_optimizer_steps(begin: Callable[[], None]) -> bool:
    """Call ``begin`` before each step of any optimizer, and remember the replicas that the script makes.

    Return False if the script has not imported torch.
    """
    optimizers, modules = sys.modules.get("torch.optim.optimizer"), sys.modules.get("torch.nn.modules.module")
    if optimizers is None or modules is None:
        return False
    from weakref import ref

    def note(parent: Any, name: str, child: Any) -> None:
        if name == "module" and type(parent).__name__ == "DistributedDataParallel" and child is not None:
            _replicas.append(ref(parent))

    optimizers.register_optimizer_step_pre_hook(lambda *_: begin())
    modules.register_module_module_registration_hook(note)
    return True


def wait_for_gradients() -> None:
    """Wait until NCCL's collectives are done: an aborted one leaves wrong gradients, and no exception before this."""
    torch = _torch()
    if torch is not None and _uses_nccl() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


# --- process groups ---------------------------------------------------------------------------------------------------


def has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


def _uses_nccl() -> bool:
    return has_group() and "nccl" in str(sys.modules["torch.distributed"].get_backend())


def abort_groups() -> None:
    """Abort NCCL's collectives, from the reader thread. gloo's end with their connections."""
    if not _uses_nccl():
        return
    for group in list(sys.modules["torch.distributed.distributed_c10d"]._world.pg_names):
        try:
            group.abort()
        except Exception as error:
            sys.stderr.write(f"tenax: could not abort a process group: {error}\n")


def destroy_groups() -> None:
    """Destroy the groups of the ended generation, and detach its replicas from their parameters."""
    while _replicas:
        replica = _replicas.pop()()
        if getattr(replica, "reducer", None) is not None:
            replica.reducer._remove_autograd_hooks()
            replica.reducer = replica.logger = replica.process_group = None
    if _uses_nccl():
        sys.modules["torch.distributed.distributed_c10d"]._abort_process_group()
    elif has_group():
        sys.modules["torch.distributed"].destroy_process_group()


def marks_of(encoded: Any) -> list[dict[str, Any]]:
    """Return the marks of all buffers of an encoded state, in order."""
    found: list[dict[str, Any]] = []
    pending = [encoded]
    while pending:
        each = pending.pop()
        if isinstance(each, list):
            pending += each
        elif isinstance(each, dict) and "buffer" in each:
            found.append(each)
        elif isinstance(each, dict):
            pending += each.values()
    return sorted(found, key=lambda mark: int(mark["buffer"]))


class TorchGroup:
    """The ranks of a generation, through torch's default process group."""

    def __init__(self) -> None:
        self._torch = _torch()
        self._distributed = sys.modules["torch.distributed"]
        kinds = [str(device) for device in self._distributed.group.WORLD._device_types]
        self._device = "cpu" if "cpu" in kinds else kinds[0]

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        mine = self._torch.tensor(list(row), dtype=self._torch.int64, device=self._device)
        rows = [self._torch.empty_like(mine) for _ in range(self._distributed.get_world_size())]
        self._distributed.all_gather(rows, mine)
        return [each.tolist() for each in rows]

    def send(self, header: bytes, buffers: list[Any], rank: int) -> None:
        torch = self._torch
        self._send(torch.tensor([len(header)], dtype=torch.int64).view(torch.uint8), rank)
        self._send(self._flat(header), rank)
        flat = [self._flat(buffer) for buffer in buffers]
        for pieces in _messages([len(each) for each in flat]):
            parts = [flat[at][start:end].to(self._device) for at, start, end in pieces]
            self._send(parts[0] if len(parts) == 1 else torch.cat(parts), rank)

    def receive(self, rank: int) -> tuple[Any, list[Any]]:
        torch = self._torch
        length = int(self._receive(8, rank).view(torch.int64).item())
        encoded = json.loads(bytes(self._receive(length, rank).tolist()))
        marks = marks_of(encoded)
        flat = [torch.empty(mark["details"][0], dtype=torch.uint8, device=self._device) for mark in marks]
        for pieces in _messages([len(each) for each in flat]):
            data = self._receive(sum(end - start for _, start, end in pieces), rank)
            for at, start, end in pieces:
                flat[at][start:end], data = data[: end - start], data[end - start :]
        return encoded, [self._content(mark, each) for mark, each in zip(marks, flat, strict=True)]

    def _content(self, mark: dict[str, Any], flat: Any) -> Any:
        if mark["kind"] != "tensor":
            return bytes(flat.cpu().numpy())
        _, kind, shape, _ = mark["details"]
        return flat.view(getattr(self._torch, kind)).reshape(shape)

    def _flat(self, buffer: Any) -> Any:
        torch = self._torch
        if is_tensor(buffer):
            return buffer.detach().contiguous().reshape(-1).view(torch.uint8)
        empty = torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(buffer), dtype=torch.uint8) if len(buffer) else empty

    def _send(self, data: Any, rank: int) -> None:
        self._distributed.send(data.to(self._device).contiguous(), rank)

    def _receive(self, size: int, rank: int) -> Any:
        data = self._torch.empty(size, dtype=self._torch.uint8, device=self._device)
        self._distributed.recv(data, rank)
        return data


def _messages(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Divide buffers of these lengths into messages of pieces: buffer, start, end. Small buffers share a message."""
    pieces: list[tuple[int, int, int]] = []
    size = 0
    for at, length in enumerate(lengths):
        for start in range(0, length, _CHUNK):
            end = min(length, start + _CHUNK)
            if pieces and size + end - start > _CHUNK:
                yield pieces
                pieces, size = [], 0
            pieces.append((at, start, end))
            size += end - start
    if pieces:
        yield pieces


# --- tensors ----------------------------------------------------------------------------------------------------------


def is_tensor(value: Any) -> bool:
    torch = _torch()
    return torch is not None and isinstance(value, torch.Tensor)


def described(tensor: Any, path: str) -> tuple[Any, str, int, str, list[int], str]:
    """Return a tensor, and what is needed to make it again: bytes, dtype, shape, device."""
    torch = _torch()
    if tensor.layout is not torch.strided or tensor.is_quantized or hasattr(tensor, "placements"):
        raise TypeError(
            f"state.{path} is a sparse, quantized or distributed tensor, which is not sent to other ranks; "
            "use State(..., sharded=True) if every rank has its own part"
        )
    tensor = tensor.detach()
    size = tensor.numel() * tensor.element_size()
    return tensor, "tensor", size, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type


def copied(part: Any, new: Any) -> bool:
    """Copy a received tensor or array into the one that the script already has. Return False if it has none."""
    if is_tensor(part) and is_tensor(new) and part.shape == new.shape:
        with _torch().no_grad():
            part.copy_(new)
        return True
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(part, numpy.ndarray) or not isinstance(new, numpy.ndarray):
        return False
    if part.shape != new.shape or not part.flags.writeable:
        return False
    part[...] = new
    return True


# --- steps ------------------------------------------------------------------------------------------------------------


def begin_steps(state: State) -> None:
    """Drop the gradients of a step that was cut, and copy what a forward pass changes: the buffers of modules."""
    torch = _torch()
    modules = [part for _, part in state._parts() if torch is not None and isinstance(part, torch.nn.Module)]
    for module in modules:
        module.zero_grad()
    buffers = [buffer for module in modules for buffer in module.buffers()]
    state._kept = (state.step, [(buffer, buffer.detach().clone()) for buffer in buffers])


def keep_buffers(state: State) -> None:
    """A step is completed: copy the buffers again. Costs nothing for modules without buffers."""
    if state._kept is not None:
        for buffer, copy in state._kept[1]:
            copy.copy_(buffer)
        state._kept = (state.step, state._kept[1])


def forget_step(state: State) -> None:
    """Undo what a step that was not completed has changed in the buffers of modules: the statistics of BatchNorm."""
    if state._kept is not None and state._kept[0] == state.step:
        for buffer, copy in state._kept[1]:
            buffer.copy_(copy)
