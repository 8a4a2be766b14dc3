"""Plans at random, one after the other: all that a plan may say, from a scheduler without any sense."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from nanoengine.engine.messages import Chunk, Entries, Place, Started, StepPlan, Tier, Transfer
from tests.runner.plans import decodes, sampling

PROMPTS = [[random.Random(n).randrange(300) for _ in range(n)] for n in (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 23, 30)]
NUM_SEEDS = 3

Continuation = Callable[[list[int], int], list[int]]
"""The tokens that follow a prompt, by the seed of its row: as many as a sequence can get."""


@dataclass(eq=False)
class ToySequence:
    """A sequence in a row. `num_tokens` counts those that are on their way; the continuation knows them already."""

    row: int
    prompt: list[int]
    seed: int
    tables: list[list[int]]
    num_tokens: int
    num_computed: int = 0
    num_told: int = 0  # tokens of its last start, from which chunks take theirs


@dataclass
class RandomPlans:
    """A scheduler that ends, begins, resumes and forks sequences whenever it likes.

    Args:
        rng: decides.
        num_rows, num_blocks, block_size, max_len: of the executor; `num_blocks` without the null block.
        continuation: what will be sampled.
        num_groups: tables of each sequence.
        params: of all sequences.
        max_chunk: longest chunk.

    Attributes:
        seqs: by row.
        unsound: rows whose blocks nobody else is to share.
        expected: of the last plan, the token of each sample.
    """

    rng: random.Random
    num_rows: int
    num_blocks: int
    block_size: int
    max_len: int
    continuation: Continuation
    num_groups: int = 1
    params: dict[str, Any] = field(default_factory=dict)
    max_chunk: int = 12

    def __post_init__(self) -> None:
        self.seqs: dict[int, ToySequence] = {}
        self.unsound: set[int] = set()
        self.expected: list[int] = []
        self._users = [0] * (self.num_blocks + 1)
        self._free = list(range(1, self.num_blocks + 1))

    def next(self) -> StepPlan:
        """The next plan; it may be empty."""
        self._plan = StepPlan()
        self._decoded: list[ToySequence] = []
        self._sampled: list[ToySequence] = []  # by chunks
        for seq in list(self.seqs.values()):
            if seq.num_tokens >= self.max_len or self.rng.random() < 0.06:
                self._end(seq)
            elif self.rng.random() < 0.06:
                self._resume(seq)
            elif self.rng.random() < 0.06:
                self._refork(seq)
        for row in self._free_rows():
            if self.rng.random() < 0.4:
                self._begin(row)
        chosen = [seq for seq in self.seqs.values() if self.rng.random() < 0.7]
        for seq in self.rng.sample(chosen, len(chosen)):
            self._run(seq)
        self._plan.decodes = decodes(*((seq.row, seq.num_computed - 1) for seq in self._decoded))
        samplers = [*self._decoded, *self._sampled]
        self.expected = [self._tokens(seq)[seq.num_tokens - 1] for seq in samplers]
        return self._plan

    # ---- sequences

    def _tokens(self, seq: ToySequence) -> list[int]:
        return [*seq.prompt, *self.continuation(seq.prompt, seq.seed)]

    def _free_rows(self) -> list[int]:
        return [row for row in range(self.num_rows) if row not in self.seqs]

    def _begin(self, row: int) -> None:
        prompt = self.rng.choice([prompt for prompt in PROMPTS if len(prompt) < self.max_len])
        tables: list[list[int]] = [[] for _ in range(self.num_groups)]
        seq = ToySequence(row, prompt, self.rng.randrange(NUM_SEEDS), tables, len(prompt))
        self.seqs[row] = seq
        self._tell(seq)

    def _resume(self, seq: ToySequence) -> None:
        """Take its blocks and let it begin anew with all its tokens."""
        self._give_back(seq)
        seq.num_computed = 0
        self._tell(seq)

    def _refork(self, seq: ToySequence) -> None:
        """Let it go on as another one that decodes."""
        sound = [other for row, other in self.seqs.items() if row not in self.unsound]
        parents = [other for other in sound if other.num_tokens == other.num_computed + 1]
        if parents:
            self._share(self.rng.choice(parents), seq)
            self._tell(seq)

    def _end(self, seq: ToySequence) -> None:
        self._give_back(seq)
        del self.seqs[seq.row]
        self._plan.ended.append(seq.row)

    def _share(self, parent: ToySequence, child: ToySequence) -> None:
        tables = [table.copy() for table in parent.tables]
        for block in chain.from_iterable(tables):
            self._users[block] += 1
        self._give_back(child)
        child.tables, child.prompt, child.num_computed = tables, parent.prompt, parent.num_computed
        child.num_tokens = parent.num_tokens
        if child.num_tokens > len(child.prompt):
            child.seed = parent.seed

    def _tell(self, seq: ToySequence) -> None:
        tokens = self._tokens(seq)[: seq.num_tokens]
        how = sampling(seq.seed, len(seq.prompt), **self.params)
        tables = tuple(table.copy() for table in seq.tables)
        self._plan.started = [start for start in self._plan.started if start.row != seq.row]
        self._plan.started.append(Started(seq.row, tokens, tables, how))
        seq.num_told = len(tokens)

    # ---- blocks

    def _give_back(self, seq: ToySequence) -> None:
        for block in chain.from_iterable(seq.tables):
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)
        seq.tables = [[] for _ in seq.tables]

    def _take_block(self) -> int:
        block = self._free.pop(self.rng.randrange(len(self._free)))
        self._users[block] = 1
        return block

    def _make_room(self, seq: ToySequence, count: int) -> bool:
        """Slots of its own for its next `count` tokens; False if there are too few blocks."""
        first, end = seq.num_computed // self.block_size, -(-(seq.num_computed + count) // self.block_size)
        if len(self._free) < (end - first) * self.num_groups:
            return False
        told = next((start for start in self._plan.started if start.row == seq.row), None)
        for group, table in enumerate(seq.tables):
            for entry in range(first, min(end, len(table))):
                if self._users[table[entry]] > 1:
                    self._users[table[entry]] -= 1
                    new = self._take_block()
                    copied = Place(Tier.DEVICE, table[entry]), Place(Tier.DEVICE, new)
                    self._plan.transfers.append(Transfer(*copied))
                    table[entry] = new
                    if told is None or self.rng.random() < 0.5:
                        self._plan.tables.append(Entries(seq.row, group, entry, [new]))
                    else:
                        told.tables[group][entry] = new
            more = [self._take_block() for _ in range(end - len(table))]
            if more and (told is None or self.rng.random() < 0.5):
                self._plan.tables.append(Entries(seq.row, group, len(table), more))
            elif told is not None:
                told.tables[group].extend(more)
            table += more
        return True

    # ---- runs

    def _run(self, seq: ToySequence) -> None:
        left = seq.num_tokens - seq.num_computed
        decoding = left == 1 and (seq.num_tokens > seq.num_told or self.rng.random() < 0.8)
        count = self.rng.randint(1, min(left, self.max_chunk))
        if not self._make_room(seq, count):
            return
        seq.num_computed += count
        if decoding:
            seq.num_tokens += 1
            self._decoded.append(seq)
            return
        samplers = [seq, *self._fork(seq)] if count == left else []
        rows = tuple(sampler.row for sampler in samplers)
        self._plan.chunks.append(Chunk(seq.row, seq.num_computed - count, count, rows))
        for sampler in samplers:
            sampler.num_tokens += 1
        self._sampled += samplers

    def _fork(self, parent: ToySequence) -> list[ToySequence]:
        children: list[ToySequence] = []
        while parent.num_tokens == len(parent.prompt) and self._free_rows() and self.rng.random() < 0.3:
            row = self.rng.choice(self._free_rows())
            child = ToySequence(row, [], self.rng.randrange(NUM_SEEDS), [[] for _ in parent.tables], 0)
            self._share(parent, child)
            self.seqs[row] = child
            self._tell(child)
            children.append(child)
        return children
