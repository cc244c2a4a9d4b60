"""``Std``: selects a worker's output streams, for all local ranks (``3``) or for some (``0:1,12:3``)."""

from __future__ import annotations

from enum import IntFlag

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_ONE_FOR_ALL = r"[0-3]\Z"
_ONE_PER_RANK = r"[0-9]+:[0-3](?:,[0-9]+:[0-3])*\Z"


class Std(IntFlag):
    """Nothing, stdout, stderr, or both."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Parse ``"2"``, one value for all workers, or ``"0:1,12:3"``, one value per local rank."""
        import re  # here, because every launch imports this module and few parse a list

        if re.match(_ONE_FOR_ALL, vm):
            return cls(int(vm))
        if re.match(_ONE_PER_RANK, vm):
            pairs = (pair.split(":") for pair in vm.split(","))
            return {int(local_rank): cls(int(value)) for local_rank, value in pairs}
        raise ValueError(
            f"invalid streams {vm!r}; expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
            "or a list of local_rank:value such as 0:3,12:1"
        )


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """Return one value for every local rank; a rank missing in the map gets ``Std.NONE``."""
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {local_rank: val_or_map.get(local_rank, Std.NONE) for local_rank in range(local_world_size)}
