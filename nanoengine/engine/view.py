"""EngineView: what a page shows of an engine at one moment: who runs with which blocks, and what the blocks of the pool hold.

Plain data for any encoder. It has lengths and ids, and no prompt, text or token of anybody. How long it takes to make, and how
large it is, is bounded by the constants below, and not by the pool or by the queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, repeat
from operator import is_not
from typing import TYPE_CHECKING, Literal

import numpy as np

from nanoengine.engine.sequence import Sequence, Status

if TYPE_CHECKING:
    from nanoengine.engine.kv.block_pool import BlockPool
    from nanoengine.engine.llm_engine import LLMEngine
    from nanoengine.engine.scheduler import Scheduler

MAX_RUNNING, MAX_FETCHING, MAX_WAITING = 96, 16, 32
"""Most sequences of each kind in a view: the first in order."""

MAX_CELLS = 2048
"""Most blocks in the map: the first of the pool. Empty blocks are handed out in their order, so that is where the life is."""

MAX_TABLE_ENTRIES = 8192
"""Most blocks of all sequences of a view together; each may name an equal share of so many."""

State = Literal["prefill", "decode", "waiting", "preempted", "fetching"]
"""What a sequence is about: it computes its prompt, or generates; it has not begun, had to give its blocks back, or waits for
files.
"""

FREE, CACHED, OPEN, FULL, SHARED = CELLS = ".cofs"
"""What a block is, in the map: empty; of nobody, but with K/V that can be hit; of one sequence, with K/V that nobody can hit (it
is being filled); of one sequence, and can be hit; of several.
"""

_CELL_OF = np.frombuffer((FREE + CACHED + OPEN + FULL + SHARED + SHARED).encode(), np.uint8)
"""The cell of a block, by twice its references (at most two of them count), and one more if it can be hit."""


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One completion of a request. Lengths in tokens."""

    request_id: str
    index: int  # which of the request's completions
    state: State
    num_prompt: int
    num_computed: int
    num_output: int
    num_cached: int | None  # of the prompt, found in the cache when it was first admitted; None before that
    num_preemptions: int
    priority: int
    num_blocks: int  # in all KV groups
    blocks: list[int]  # the first of them


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool of KV blocks: ids begin with 1, and `cells` with that block."""

    num_blocks: int
    block_size: int  # tokens
    num_free: int  # empty
    num_cached: int  # of nobody, but with K/V that can be hit
    num_used: int  # the others: of one sequence or of several
    cells: str  # one of CELLS for each of the first blocks; empty ones at its end are left out


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the engine's life; rates come from two views."""

    prefill_tokens: int
    decode_tokens: int
    num_steps: int
    num_requests: int
    num_queried_tokens: int  # looked up in the prefix cache, and found
    num_hit_tokens: int
    num_preemptions: int
    num_evicted_blocks: int
    num_copied_blocks: int
    num_drafts: int | None  # verified, and accepted; None without speculation
    num_accepted: int | None


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine between two steps. `sequences` are the first in order of each kind; the counts are of all."""

    time: float  # seconds of the engine's clock
    num_running: int
    num_fetching: int
    num_waiting: int
    sequences: list[SequenceView]
    pool: PoolView
    totals: Totals


def take_view(engine: LLMEngine) -> EngineView:
    """What is to be seen of an engine, as values that change no more. Called between two steps, in the engine's thread."""
    scheduler = engine.scheduler
    shown = [
        *islice(scheduler.running, MAX_RUNNING),
        *islice(scheduler.fetching, MAX_FETCHING),
        *islice(scheduler.waiting, MAX_WAITING),
    ]
    most_blocks = MAX_TABLE_ENTRIES // max(len(shown), 1)
    begun = set(scheduler.begun)
    return EngineView(
        time=engine.clock(),
        num_running=len(scheduler.running),
        num_fetching=len(scheduler.fetching),
        num_waiting=len(scheduler.waiting),
        sequences=[_sequence(engine, seq, seq in begun, most_blocks) for seq in shown],
        pool=_pool(scheduler.block_manager.pool, scheduler.block_manager.block_size),
        totals=_totals(engine),
    )


def _sequence(engine: LLMEngine, seq: Sequence, is_begun: bool, most_blocks: int) -> SequenceView:
    request = engine.request_of(seq)
    return SequenceView(
        request_id=request.request_id,
        index=seq.index,
        state=_state(seq, is_begun),
        num_prompt=seq.num_prompt_tokens,
        num_computed=seq.num_computed_tokens,
        num_output=seq.num_output_tokens,
        num_cached=seq.num_cached_tokens,
        num_preemptions=seq.num_preemptions,
        priority=request.priority,
        num_blocks=sum(map(len, seq.block_tables)) - sum(seq.first_blocks),
        blocks=_blocks(seq, most_blocks),
    )


def _state(seq: Sequence, is_begun: bool) -> State:
    if seq.status is Status.RUNNING:
        return "prefill" if is_begun else "decode"
    if seq.status is Status.FETCHING:
        return "fetching"
    return "preempted" if seq.num_preemptions else "waiting"


def _blocks(seq: Sequence, most: int) -> list[int]:
    """The first blocks of a sequence, without what its tables have forgotten; those of several groups one after the other."""
    if len(seq.block_tables) == 1:  # most often: a view is made while the device may wait for the next step
        first = seq.first_blocks[0]
        return seq.block_tables[0][first : first + most]
    blocks: list[int] = []
    for table, first in zip(seq.block_tables, seq.first_blocks, strict=True):
        blocks += table[first : first + most // len(seq.block_tables)]
    return blocks


def _pool(pool: BlockPool, block_size: int) -> PoolView:
    return PoolView(
        num_blocks=pool.num_blocks,
        block_size=block_size,
        num_free=len(pool.empty_blocks),
        num_cached=len(pool.cached_blocks),
        num_used=pool.num_blocks - pool.num_free,
        cells=_cells(pool),
    )


def _cells(pool: BlockPool) -> str:
    references = np.array(pool.ref_counts[1 : MAX_CELLS + 1])
    contents = pool.contents[1 : MAX_CELLS + 1]
    can_be_hit = np.frombuffer(bytes(map(is_not, contents, repeat(None))), np.uint8)
    return _CELL_OF[2 * np.minimum(references, 2) + can_be_hit].tobytes().decode().rstrip(FREE)


def _totals(engine: LLMEngine) -> Totals:
    scheduler: Scheduler = engine.scheduler
    steps, cache = engine.stats, scheduler.block_manager.stats
    drafts = None if scheduler.drafts is None else scheduler.drafts.speculation.stats
    return Totals(
        prefill_tokens=steps.prefill_tokens,
        decode_tokens=steps.decode_tokens,
        num_steps=steps.num_prefill_steps + steps.num_mixed_steps + steps.num_decode_steps,
        num_requests=engine.num_requests,
        num_queried_tokens=cache.num_queried_tokens,
        num_hit_tokens=cache.num_hit_tokens,
        num_preemptions=scheduler.num_preemptions,
        num_evicted_blocks=cache.num_evicted_blocks,
        num_copied_blocks=cache.num_copied_blocks,
        num_drafts=None if drafts is None else drafts.num_drafts,
        num_accepted=None if drafts is None else drafts.num_accepted,
    )
