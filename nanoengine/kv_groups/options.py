"""Options of models whose layers have states."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoengine.core.config import BYTES
from nanoengine.core.errors import InvalidConfig, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroupsOptions:
    """Options of models whose layers have states; all are keyword arguments of `LLM`.

    Args:
        snapshot_memory: bytes, or text such as "2GiB", for snapshots of states: a cached prefix of a model with states can be
            used up to one. What there is no room for goes to host memory and files, if there are any. 0: none are taken, and
            what earlier engines left in files can be used. None: an eighth of the available RAM, or of a GPU's free memory, at
            most 1 GiB.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    snapshot_memory: int | None = field(default=None, metadata=BYTES)

    def __post_init__(self) -> None:
        memory = self.snapshot_memory
        if memory is not None and (type(memory) is not int or not 0 <= memory < 2**63):
            raise InvalidConfig(f"snapshot_memory is {shown(memory)}: it must be a number of bytes from 0, or None")
