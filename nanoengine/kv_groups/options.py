"""Options of models whose layers have states."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoengine.core.config import BYTES, MAX_INT32
from nanoengine.core.errors import InvalidConfig, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroupsOptions:
    """Options of models whose layers have states; all are keyword arguments of `LLM`.

    Args:
        snapshot_memory: bytes, or text such as "2GiB", for snapshots of states: a cached prefix of a model with states can be
            used up to one. What there is no room for goes to host memory and files, if there are any. 0: none are taken, and
            what earlier engines left in files can be used. None: an eighth of the available RAM, or of a GPU's free memory, at
            most 1 GiB.
        snapshot_interval: a prompt leaves a snapshot every so many tokens, in whole blocks, beside those at its end and where
            prompts part ways.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    snapshot_memory: int | None = field(default=None, metadata=BYTES)
    snapshot_interval: int = 512

    def __post_init__(self) -> None:
        memory, interval = self.snapshot_memory, self.snapshot_interval
        if memory is not None and (type(memory) is not int or not 0 <= memory < 2**63):
            raise InvalidConfig(f"snapshot_memory is {shown(memory)}: it must be a number of bytes from 0, or None")
        if type(interval) is not int or not 1 <= interval < MAX_INT32:
            raise InvalidConfig(f"snapshot_interval is {shown(interval)}: it must be a number of tokens from 1")
