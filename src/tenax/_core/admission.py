"""Admission: which unauthenticated connections of a listener may stay open.

Places are limited, in all and per group of peers (``peer_group``: one address, or one IPv6 network). A new connection
always gets a place: if there is none, the oldest connection of the group that has most of them is evicted. So a flood
from one address evicts its own connections, and an honest peer has as much time as the flood needs to fill every place.

With ``from_middle`` not the oldest connection of a group is evicted but the one in the middle, by age: neither those
that were there before a flood, and may honestly be idle for long, nor those that have just come.

Every operation takes constant time, whatever the number of connections and groups; an eviction from the middle takes
time for half of a group, ``expired`` for what it returns. Times are the caller's; they must not decrease from one
``admit`` to the next.
"""

from __future__ import annotations

from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Generic, TypeVar

    Key = TypeVar("Key")  # what the caller names a connection by; hashable

    class _ByKey(Generic[Key]):
        """Avoids importing ``typing``, which would take longer than all other imports of the store process."""
else:

    class _ByKey:
        __class_getitem__ = classmethod(lambda cls, _: cls)

    Key = object

_NETWORK_WORDS = 4  # of an IPv6 address: its first 64 bits, which one host may choose the rest of


class Admission(_ByKey[Key]):
    """The connections that hold a place, by group, the oldest first."""

    def __init__(self, max_total: int, max_per_group: int, *, from_middle: bool = False) -> None:
        if not 1 <= max_per_group <= max_total:
            raise ValueError(
                f"1 <= max_per_group <= max_total must hold, not max_per_group={max_per_group} and "
                f"max_total={max_total}"
            )
        self._max_total = max_total
        self._max_per_group = max_per_group
        self._from_middle = from_middle
        self._places: dict[Key, tuple[str, float]] = {}  # the group, and when it was admitted; the oldest first
        self._groups: dict[str, dict[Key, None]] = {}
        self._by_size: dict[int, dict[str, None]] = {}  # groups by the number of their connections
        self._largest = 0  # number of connections of the largest group
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def admit(self, key: Key, group: str, now: float) -> list[Key]:
        """Give ``key`` a place and return the connections to close, which have lost theirs."""
        evicted: list[Key] = []
        if len(self._groups.get(group, ())) >= self._max_per_group:
            evicted.append(self._evict(group))
        elif len(self._places) >= self._max_total:
            evicted += self.evict_one()
        self._places[key] = (group, now)
        self._groups.setdefault(group, {})[key] = None
        self._resize(group, len(self._groups[group]) - 1)
        return evicted

    def evict_one(self) -> list[Key]:
        """Evict a connection of the largest group, because something else is used up; return it if there is one."""
        return [self._evict(next(iter(self._by_size[self._largest])))] if self._places else []

    def oldest_since(self) -> float | None:
        """Return when the oldest connection was admitted, or None if there is none."""
        return next((since for _, since in self._places.values()), None)

    def release(self, key: Key) -> None:
        """Free the place of ``key``, which was closed or has authenticated. Does nothing if it has none."""
        place = self._places.pop(key, None)
        if place is None:
            return
        group = place[0]
        members = self._groups[group]
        del members[key]
        if not members:
            del self._groups[group]
        self._resize(group, len(members) + 1)

    def expired(self, now: float, max_age_s: float) -> list[Key]:
        """Return the connections admitted more than ``max_age_s`` ago. They keep their places until released."""
        found: list[Key] = []
        for key, (_, since) in self._places.items():
            if now - since <= max_age_s:
                break
            found.append(key)
        return found

    def _evict(self, group: str) -> Key:
        members = self._groups[group]
        key = next(islice(members, len(members) // 2 if self._from_middle else 0, None))
        self.release(key)
        self.evicted += 1
        return key

    def _resize(self, group: str, size_before: int) -> None:
        """Move the group among ``_by_size``. Sizes change by one, so the largest one does too."""
        size = len(self._groups.get(group, ()))
        if size_before:
            peers = self._by_size[size_before]
            del peers[group]
            if not peers:
                del self._by_size[size_before]
        if size:
            self._by_size.setdefault(size, {})[group] = None
        if size > self._largest or self._largest not in self._by_size:
            self._largest = size


def peer_group(address: str) -> str:
    """Return the group of a peer's address, as the system prints it: an IPv4 address itself, an IPv6 address's /64."""
    if ":" not in address:
        return address
    head, gap, tail = address.partition("%")[0].partition("::")
    if "." in tail:  # an IPv4 address, as a socket for both families sees it
        return tail.rpartition(":")[2]
    words = [word for word in head.split(":") if word]
    if gap:
        words += ["0"] * (8 - len(words) - len([word for word in tail.split(":") if word]))
        words += tail.split(":")
    return ":".join(words[:_NETWORK_WORDS]) + "::/64"
