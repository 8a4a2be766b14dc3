"""What a cache-aware router needs to hear: which prefixes this engine has in memory, and which it has lost.

A router that hashes the prompts of its requests in the same way knows which engine has most of a prompt cached. Hashes
are chained, so a block is found by its own hash; the token ids are there for routers that keep a tree of their own.
Files are not told of: others may delete them at any time. What is read back from one is stored again.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A full block can be hit from now on, or as soon as the step that computes it is done.

    Attributes:
        hash: of the block and everything before it.
        parent_hash: of the block before it; b"" for the first.
        token_bytes: its tokens, int32, behind the bytes of the request's cache salt in a first block.
        group: of layers that it can be hit in. A prompt is hit as far as every group has what its next token sees.
    """

    hash: bytes
    parent_hash: bytes
    token_bytes: bytes
    group: int = 0

    def token_ids(self, block_size: int) -> list[int]:
        return array("i", self.token_bytes[-4 * block_size :]).tolist()


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The last copy of a block in a group is gone, from the pool and from host memory."""

    hash: bytes
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Nothing is cached any more."""


KVEvent = BlockStored | BlockRemoved | AllCleared
