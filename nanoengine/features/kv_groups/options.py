"""Options of models whose layers have states."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.options import option
from nanoengine.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroupsOptions(Options):
    """Options of models whose layers have states; all are keyword arguments of `LLM`.

    Args:
        snapshot_memory: bytes, or text such as "2GiB", for snapshots of states: a cached prefix of a model with states can be
            used up to a snapshot. Evicted snapshots go to host memory and files, if these are used. 0: no snapshots, except those
            that earlier engines wrote to files. None: an eighth of the available RAM, or of a GPU's free memory, at most 1 GiB.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    snapshot_memory: int | None = option(None, 0, 2**50, unit="bytes")
