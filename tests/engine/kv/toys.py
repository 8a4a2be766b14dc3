"""Toys for the tests of this folder: a sequence without a scheduler, and whole steps without a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from hypothesis import HealthCheck, settings

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.block_pool import BlockPool, Prefix
from nanoengine.engine.kv.events import AllCleared, BlockStored, KVEvent
from nanoengine.engine.kv.orders import Orders
from nanoengine.engine.messages import FileDone, Tier, Transfer

FAST = settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
B = 4
"""Block size, where nothing else is said."""


class ToySequence:
    """What the block manager knows of a sequence."""

    def __init__(self, seq_id: int, prompt: Iterable[int], *, cache_salt: str | bytes = "", reads_cache: bool = True):
        self.seq_id = seq_id
        self.token_ids = list(prompt)
        self.coming: list[int] = []  # tokens on their way
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        self.row = 0
        self.num_encoder_tokens = 0
        self.block_tables: list[list[int]] = []
        self.first_blocks: list[int] = []
        self.prefix: Prefix | None = None
        self.block_hashes: list[bytes] = []
        self.block_tokens: list[bytes] = []
        self.num_published = 0
        self.num_slots = 0
        self.cache_salt = cache_salt.encode() if isinstance(cache_salt, str) else cache_salt
        self.reads_cache = reads_cache

    @property
    def block_table(self) -> list[int]:
        """That of the only group, or of the first."""
        return self.block_tables[0] if self.block_tables else []

    @property
    def num_known_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + len(self.coming)

    @property
    def num_written_tokens(self) -> int:
        return min(self.num_computed_tokens, self.num_known_tokens - 1)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    def __repr__(self) -> str:
        return f"ToySequence({self.seq_id}, {self.num_computed_tokens}/{self.num_tokens} tokens computed)"


def make_sequence(seq_id: int, prompt: Iterable[int], **options: object) -> ToySequence:
    return ToySequence(seq_id, prompt, **options)  # type: ignore[arg-type]


def tell(seq: ToySequence, *tokens: int) -> None:
    """Give a sequence new tokens, sampled and known."""
    seq.token_ids += tokens


def free_order(pool: BlockPool) -> list[int]:
    return pool.free_blocks


def snapshot(pool: BlockPool) -> tuple[object, ...]:
    """Everything that a pool knows, as a value."""
    index = [
        (p.hash, id(p), [kv and (kv.blocks, kv.host_slot, kv.host_filled) for kv in p.kv]) for p in pool.prefixes()
    ]
    return (
        tuple(pool.ref_counts),
        tuple(map(id, pool.contents)),
        tuple(pool.free_blocks),
        tuple(pool.uncommitted),
        repr(index),
    )


def start(manager: BlockManager, seq_id: int, prompt: Iterable[int], **options: object) -> ToySequence:
    """Admit a new sequence and let the plan that is being made compute its prompt."""
    seq = make_sequence(seq_id, prompt, **options)
    again(manager, seq)
    return seq


def again(manager: BlockManager, seq: ToySequence) -> None:
    """The same for a sequence that waits."""
    cached = manager.admit(seq)
    assert cached is not None
    seq.num_cached_tokens = cached
    seq.num_computed_tokens = seq.num_tokens
    manager.publish(seq, seq.num_tokens, False)


def step(manager: BlockManager) -> Orders:
    """A plan that goes well, but for files: those are never done."""
    orders = manager.take_orders()
    manager.check()
    manager.commit()
    manager.check()
    return orders


def run(manager: BlockManager, seq_id: int, prompt: Iterable[int], **options: object) -> ToySequence:
    """A sequence that computes its prompt, and ends."""
    seq = start(manager, seq_id, prompt, **options)
    step(manager)
    manager.free(seq)
    return seq


def fetch_and_run(manager: BlockManager, seq_id: int, prompt: Iterable[int]) -> ToySequence:
    """The same with all files that it wants, which are all sound. So are those that are written."""
    seq = make_sequence(seq_id, prompt)
    if manager.fetch(seq):
        settle(manager)
    assert not manager.is_fetching(seq)
    assert not manager.fetch(seq)
    again(manager, seq)
    settle(manager)
    manager.free(seq)
    return seq


def settle(manager: BlockManager, problem: str | None = None) -> Orders:
    """A plan that goes well, and whose files are done before it is."""
    orders = manager.take_orders()
    manager.check()
    manager.commit([FileDone(order.path, problem) for order in (*orders.reads, *orders.writes)])
    manager.check()
    return orders


def evict(manager: BlockManager, count: int | None = None) -> None:
    """Somebody takes free blocks, all of them if not told how many, for a moment."""
    room = manager.pool.num_free if count is None else count
    num_tokens = manager.groups.longest(room, 1 << 20) - 1
    intruder = make_sequence(-1, [-1 - room] * num_tokens, reads_cache=False)
    assert manager.groups.blocks_at_once(num_tokens + 1) == room
    assert manager.admit(intruder) is not None
    manager.discard(intruder)


def num_cached(manager: BlockManager, prompt: Iterable[int], **options: object) -> int | None:
    """How much of a prompt a new sequence would find; the pool's references stay as they were."""
    seq = make_sequence(999, prompt, **options)
    cached = manager.admit(seq)
    manager.discard(seq)
    return cached


def moves(transfers: Seq[Transfer]) -> list[tuple[Tier, Tier]]:
    return [(transfer.source.tier, transfer.target.tier) for transfer in transfers]


Known = Counter[tuple[bytes, int]]
"""Hash and group -> number of prefixes."""


def follow(known: Known, events: Iterable[KVEvent]) -> None:
    """What a listener makes of events."""
    for event in events:
        if isinstance(event, AllCleared):
            known.clear()
        else:
            known[event.hash, event.group] += 1 if isinstance(event, BlockStored) else -1


def cached(manager: BlockManager) -> Known:
    """What a listener should know."""
    pool = manager.pool
    return Counter((kv.prefix.hash, kv.group) for prefix in pool.prefixes() for kv in prefix.kv if kv is not None)
