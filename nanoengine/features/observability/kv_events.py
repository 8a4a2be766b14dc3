"""Events of the prefix cache for cache-aware routers: blocks that the KV pool of this engine has stored and removed.

With them a router knows which engine has most of a prompt cached. Hashes are chained, so the hash of a block identifies its
prefix; the token ids are for routers with a prefix tree. Host memory and files have no events: a block that is loaded from
there is stored again.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.messages import StepResult
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import KVStore, PolicyPart
from nanoengine.core.sequence import Sequence

logger = logging.getLogger("nanoengine")


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A full block was cached.

    Attributes:
        hash: of the block and everything before it.
        parent_hash: of the block before it; b"" for the first.
        token_bytes: its tokens, int32.
        group: its KV group. A hit needs, in every group, the blocks that the next token attends to.
    """

    hash: bytes
    parent_hash: bytes
    token_bytes: bytes
    group: int = 0

    def token_ids(self) -> list[int]:
        return array("i", self.token_bytes).tolist()


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block of a group is no longer cached in the pool."""

    hash: bytes
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllCleared:
    """The cache was cleared."""


KVEvent = BlockStored | BlockRemoved | AllCleared

KVEventListener = Callable[[KVEvent], object]


class KVEventPublisher(KVStore, PolicyPart):
    """The source of events: a `KVStore` without blocks, and a `PolicyPart` while there is a listener. Events are collected inside
    the block manager, and published after each step.

    Attributes:
        num_evicted: blocks that were evicted from the pool.
        num_errors: exceptions of the listener, which do not concern the engine.
    """

    def __init__(self) -> None:
        self.num_evicted = self.num_errors = 0
        self.parents: dict[tuple[int, bytes], bytes] = {}  # of the blocks in the pool
        self._listener: KVEventListener | None = None
        self._events: list[KVEvent] = []

    def attach(self, listener: KVEventListener | None, engine: LLMEngine) -> None:
        """Publish events to this listener, beginning with all cached blocks, parents first. None: to no listener."""
        self.publish()
        self._listener = listener
        parts, blocks = engine.scheduler.parts, engine.scheduler.blocks
        if self in parts:
            parts.remove(self)
        if listener is None:
            return
        parts.append(self)
        published: set[tuple[int, bytes]] = set()
        for group, index in enumerate(blocks.index):
            for hash in index:
                chain = []
                while (group, hash) in self.parents and (group, hash) not in published:
                    published.add((group, hash))
                    chain.append(hash)
                    hash = self.parents[group, hash]
                for block_hash in reversed(chain):
                    cached = blocks.contents[index[block_hash]]
                    assert cached is not None
                    self._note(BlockStored(block_hash, self.parents[group, block_hash], cached.tokens, group))
        self.publish()

    def publish(self) -> None:
        """Call the listener with the events since the last call."""
        events, self._events = self._events, []
        for event in events:
            try:
                if self._listener is not None:  # it may have detached itself
                    self._listener(event)
            except Exception as problem:
                self.num_errors += 1
                if self.num_errors == 1:
                    logger.warning("the listener of KV events raised %r; more of this is counted, not logged", problem)

    def _note(self, event: KVEvent) -> None:
        if self._listener is not None:
            self._events.append(event)

    # ---- KVStore

    def cached(self, group: int, hash: bytes, parent: bytes, tokens: bytes, block: int) -> None:
        self.parents[group, hash] = parent
        self._note(BlockStored(hash, parent, tokens, group))

    def evicted(self, group: int, hash: bytes, tokens: bytes, block: int) -> None:
        self.num_evicted += 1
        self._remove(group, hash)

    def invalidated(self, group: int, hash: bytes, tokens: bytes) -> None:
        self._remove(group, hash)

    def _remove(self, group: int, hash: bytes) -> None:
        if self.parents.pop((group, hash), None) is not None:
            self._note(BlockRemoved(hash, group))

    def clear(self) -> None:
        self.parents.clear()
        self._note(AllCleared())
        self.publish()  # no step may follow

    # ---- PolicyPart

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        self.publish()

    def concerns(self, seq: Sequence) -> bool:
        return False

    def finished(self, seq: Sequence) -> None:
        self.publish()
