"""EngineView: a view of an engine at one moment: its sequences, their blocks, and the state of the blocks of the pool.

Plain data for any encoder. It has lengths and ids, and no prompt, text or token. Its size is bounded by the constants below. The
time to make it is linear in the free blocks of the pool.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from itertools import islice, repeat
from operator import is_not
from typing import Literal

import numpy as np

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.sequence import Phase, Sequence
from nanoengine.features.observability.observer import Observer
from nanoengine.features.statistics import Statistics

MAX_RUNNING, MAX_FETCHING, MAX_WAITING = 96, 16, 32
"""Most sequences of each kind in a view: the first in order."""

MAX_CELLS = 2048
"""Most blocks in the map: the first of the pool. Empty blocks are allocated in their order."""

MAX_TABLE_ENTRIES = 8192
"""Most blocks of all sequences of a view; each sequence may name an equal part of them."""

State = Literal["prefill", "decode", "waiting", "preempted", "fetching"]
"""A sequence computes its prompt, or generates; or it waits: it has not started, was preempted, or its K/V are read from files.
"""

FREE, CACHED, OPEN, FULL, SHARED = ".cofs"
"""A block in the map: empty; cached, without a sequence; of one sequence, and not cached (it is being filled); of one
sequence, and cached; of several sequences.
"""

_CELL_OF = np.frombuffer((FREE + CACHED + OPEN + FULL + SHARED + SHARED).encode(), np.uint8)
"""The cell of a block, by twice the number of its references (at most 2), plus 1 if it is cached."""


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One completion of a request. Lengths in tokens."""

    request_id: str
    index: int  # which of the request's completions
    state: State
    num_prompt: int
    num_output: int
    num_cached: int | None  # prefix hit of the prompt when it was first admitted; None before that
    blocks: list[int]  # its first blocks, in all KV groups


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool of KV blocks: ids begin with 1, and `cells` with block 1."""

    num_blocks: int
    block_size: int  # tokens
    num_free: int  # empty
    num_cached: int  # cached, without a sequence
    num_used: int  # of sequences
    cells: str  # FREE to SHARED for each of the first blocks; free ones at the end are left out


@dataclass(frozen=True, slots=True)
class Totals(Statistics):
    """Totals over the engine's life; rates follow from two views."""

    prefill_tokens: int
    decode_tokens: int
    num_queried_tokens: int  # looked up in the prefix cache
    num_hit_tokens: int  # of them
    num_preemptions: int
    num_drafts: int | None  # verified; None without speculation
    num_accepted: int | None  # of them


@dataclass(frozen=True, slots=True)
class EngineView:
    """The view of an engine between two steps. `sequences` are the first of each kind; the counts are of all."""

    time: float  # seconds of the engine's clock
    num_running: int
    num_fetching: int
    num_waiting: int
    sequences: list[SequenceView]
    pool: PoolView
    totals: Totals


def view_of_engine(engine: LLMEngine, observer: Observer) -> EngineView:
    """The view of an engine, as values that do not change any more. Called between two steps, in the engine's thread."""
    scheduler, fetching = engine.scheduler, observer.fetching()
    shown = [
        *islice(scheduler.running, MAX_RUNNING),
        *islice((seq for seq in scheduler.waiting if seq in fetching), MAX_FETCHING),
        *islice((seq for seq in scheduler.waiting if seq not in fetching), MAX_WAITING),
    ]
    most_blocks = MAX_TABLE_ENTRIES // max(len(shown), 1)
    return EngineView(
        time=observer.clock(),
        num_running=len(scheduler.running),
        num_fetching=len(fetching),
        num_waiting=len(scheduler.waiting) - len(fetching),
        sequences=[_sequence(seq, fetching, most_blocks) for seq in shown],
        pool=_pool(scheduler.blocks),
        totals=_totals(engine, observer),
    )


def _sequence(seq: Sequence, fetching: Container[Sequence], most_blocks: int) -> SequenceView:
    blocks: list[int] = []  # inside of the visible range; those of several groups one after the other
    for table, first in zip(seq.block_tables, seq.first_blocks, strict=True):
        blocks += table[first : first + most_blocks // len(seq.block_tables)]
    return SequenceView(
        request_id=seq.request.request_id,
        index=seq.index,
        state=_state(seq, fetching),
        num_prompt=seq.num_prompt_tokens,
        num_output=len(seq.token_ids) - seq.num_prompt_tokens,
        num_cached=seq.num_cached_tokens,
        blocks=blocks,
    )


def _state(seq: Sequence, fetching: Container[Sequence]) -> State:
    if seq.phase is Phase.PREFILLING:
        return "prefill"
    if seq.phase is not Phase.WAITING:
        return "decode"
    if seq in fetching:
        return "fetching"
    return "preempted" if seq.num_preemptions else "waiting"


def _pool(blocks: BlockManager) -> PoolView:
    num_cached = sum(blocks.contents[block] is not None for block in blocks.free_blocks)
    references = np.array(blocks.ref_counts[1 : MAX_CELLS + 1])
    contents = blocks.contents[1 : MAX_CELLS + 1]
    is_cached = np.frombuffer(bytes(map(is_not, contents, repeat(None))), np.uint8)
    return PoolView(
        num_blocks=blocks.num_blocks,
        block_size=blocks.block_size,
        num_free=blocks.num_free - num_cached,
        num_cached=num_cached,
        num_used=blocks.num_blocks - blocks.num_free,
        cells=_CELL_OF[2 * np.minimum(references, 2) + is_cached].tobytes().decode().rstrip(FREE),
    )


def _totals(engine: LLMEngine, observer: Observer) -> Totals:
    steps, cache = observer.steps, observer.cache
    speculation = observer.sources.get("speculation")
    drafts = None if speculation is None else speculation()
    return Totals(
        prefill_tokens=steps.prefill_tokens,
        decode_tokens=steps.decode_tokens,
        num_queried_tokens=cache.num_queried_tokens,
        num_hit_tokens=cache.num_hit_tokens,
        num_preemptions=engine.scheduler.num_preemptions,
        num_drafts=None if drafts is None else drafts.num_drafts,
        num_accepted=None if drafts is None else drafts.num_accepted,
    )
