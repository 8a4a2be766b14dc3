"""SharedFiles: blocks that one engine writes so that another, which has the same folder, goes on from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nanoengine.core.sequence import Request
from nanoengine.kv_offload.disk_tier import DiskTier
from nanoengine.kv_offload.offload import Offload


@dataclass(slots=True)
class _Writing:
    request: Request
    num_ordered: int = 0  # of its first blocks


class SharedFiles:
    """Its methods are called between two steps."""

    def __init__(self, offload: Offload, disk: DiskTier):
        self.offload, self.disk, self.groups = offload, disk, [*offload.groups, *offload.state_groups]
        self._writing: dict[int, _Writing] = {}

    def learn(self, names: Iterable[str]) -> None:
        """Another engine has written these files. One that is not there is found missing by whoever reads it."""
        self.disk.files.update(set(names) - self.disk.writing)

    # ---- writing

    @property
    def is_writing(self) -> bool:
        return bool(self._writing)

    def write(self, key: int, request: Request) -> None:
        """Have the full blocks of a request of one completion written as they are computed.

        Args:
            key: no other request that is being written has it.
        """
        self._writing[key] = _Writing(request)

    def leave(self, key: int) -> None:
        """Nobody waits for these files any more."""
        self._writing.pop(key, None)

    def written(self) -> dict[int, list[str]]:
        """Order what was computed since the last call to be written. Returns what has ended: the names of the files of each
        request, without those that could not be written. It is left.
        """
        ended = {}
        for key, own in list(self._writing.items()):
            is_ordered = self._order(own)
            names = self._names(own.request) if own.request.finished and is_ordered else None
            if names is not None and self.disk.writing.isdisjoint(names):
                ended[key] = [name for name in names if name in self.disk.files]
                del self._writing[key]
        self.disk.awaits_writes = any(own.request.finished for own in self._writing.values())
        return ended

    def _order(self, own: _Writing) -> bool:
        """Whether all that is computed is ordered: no more at once than may wait in memory to be written."""
        for hash, tokens in own.request.sequences[0].block_hashes[own.num_ordered :]:
            if len(self.disk.writing) >= self.disk.max_staged:
                return False
            if not self.offload.write([(group, hash) for group in self.groups], tokens):
                break
            own.num_ordered += 1
        return True

    def _names(self, request: Request) -> list[str]:
        hashes = request.sequences[0].block_hashes
        return [self.disk.name((group, hash)) for hash, _ in hashes for group in self.groups]
