"""The two messages between policy and tensors: a StepPlan goes down to the executor, a StepResult comes back.

They are plain data: ids, lengths and token ids, no slots and no tensors, so that an executor in another process computes the
same tokens from their bytes. A plan states what changes; nothing is found out by comparing. If it raises, its rows are good for
nothing before they are started again; its copies count as not made, and its files answer for themselves. Several plans may be on
their way; they are executed in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from nanoengine.outputs import TokenLogprobs
from nanoengine.sampling_params import SamplingParams

UNKNOWN = -1
"""In place of a token id: going down, the last token of the row, which nobody up here may have seen yet; coming back, none."""


class Tier(Enum):
    """Where the K/V of a block can be."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Place(NamedTuple):
    """One block's worth of room."""

    tier: Tier
    where: int  # a block id of the pool, or a slot of host memory


class Transfer(NamedTuple):
    """Copy the K/V of one block, before the step computes anything."""

    source: Place
    target: Place


class FileRead(NamedTuple):
    """Read the K/V of one block into a slot of host memory, beside the steps. It may fail alone, and is answered by FileDone."""

    path: str
    header: bytes  # what the file must say of itself: any other content is as good as none
    slot: int


class FileWrite(NamedTuple):
    """Write the K/V of one block to a file, beside the steps, as it is before this step computes. It may fail alone."""

    path: str
    header: bytes
    source: Place


class FileDone(NamedTuple):
    """The end of a FileRead or FileWrite."""

    path: str
    problem: str | None = None  # None: it is done


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How the tokens of a row are sampled, from its first to its last."""

    params: SamplingParams
    seed: int  # of the request and the completion: with the position, the address of the randomness
    num_prompt_tokens: int  # where its output begins
    stop_token_ids: tuple[int, ...] = ()  # not to be sampled before min_tokens
    bad_words: tuple[tuple[int, ...], ...] = ()  # params.bad_words as token ids
    prompt_logprobs: int | None = None  # how many per prompt token; None: not wanted, or there already


class Started(NamedTuple):
    """A row begins anew, whatever it held."""

    row: int
    token_ids: list[int]  # all so far, those on their way left out
    tables: tuple[list[int], ...]  # block ids, a table per KV group
    sampling: RowSampling


class Entries(NamedTuple):
    """Some entries of a block table change: it gets longer, a shared block is copied before it is written to, or blocks are
    given back because nobody will look at them again (then they become the null block).
    """

    row: int
    group: int
    first: int
    block_ids: list[int]


class Decodes(NamedTuple):
    """Runs of one new token: the last one of the row. Each samples the next."""

    rows: np.ndarray  # [n] int32
    num_computed: np.ndarray  # [n] int32: tokens before it


class Drafted(NamedTuple):
    """A run of the last token of its row and drafts behind it, guesses at the tokens to come. Each of these samples the next.

    A draft is accepted if it is what the token before it sampled, and all drafts before it are; what is sampled behind one that
    is not, is no token of the row.
    """

    row: int
    num_computed: int  # tokens before it
    drafts: tuple[int, ...]  # UNKNOWN: whoever computes the step guesses

    @property
    def num_new(self) -> int:
        return 1 + len(self.drafts)


class Chunk(NamedTuple):
    """A run of any number of new tokens: those of its row from `num_computed` on."""

    row: int
    num_computed: int
    num_new: int
    samples: tuple[int, ...]  # rows that each sample a token behind the last; several after a fork, none before the end


NO_DECODES = Decodes(np.zeros(0, np.int32), np.zeros(0, np.int32))


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step: what changes, what is copied, what is computed. Whoever is given one must not change it.

    A batch has its decodes first, then its runs with drafts, then its chunks; its samples come in the same order.
    """

    started: list[Started] = field(default_factory=list)
    tables: list[Entries] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # rows that nobody has any more
    masks: list[tuple[int, bytes | None]] = field(
        default_factory=list
    )  # (row, bits of the vocabulary that may be sampled)
    decodes: Decodes = NO_DECODES
    drafted: list[Drafted] = field(default_factory=list)
    num_common_blocks: list[int] = field(default_factory=list)  # of each group: first blocks that all of these share
    chunks: list[Chunk] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)  # in this order
    reads: list[FileRead] = field(default_factory=list)
    writes: list[FileWrite] = field(default_factory=list)
    deletes: list[str] = field(default_factory=list)  # files nobody wants any more; behind the reads, before the writes
    wait: bool = False  # until a file is done: there is nothing else to do

    @property
    def num_new_tokens(self) -> int:
        return self.num_decode_tokens + sum(chunk.num_new for chunk in self.chunks)

    @property
    def num_decode_tokens(self) -> int:
        """New tokens of decodes, those with drafts among them. Each samples."""
        return len(self.decodes.rows) + sum(run.num_new for run in self.drafted)

    @property
    def num_samples(self) -> int:
        return self.num_decode_tokens + sum(len(chunk.samples) for chunk in self.chunks)

    @property
    def computes(self) -> bool:
        """Whether it has any tokens."""
        return bool(self.chunks or len(self.decodes.rows) or self.drafted)

    def __bool__(self) -> bool:
        return bool(self.computes or self.transfers or self.reads or self.writes or self.deletes or self.wait)


class PromptLogprobs(NamedTuple):
    """Of some tokens of a prompt, one after the other."""

    row: int
    start: int  # position of the first of these tokens
    entries: list[TokenLogprobs]


@dataclass(slots=True)
class StepResult:
    """What came of a plan."""

    token_ids: list[int]  # one per sample; UNKNOWN where none could be
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # number of the sample -> of those that asked
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    files: list[FileDone] = field(default_factory=list)  # that are done by now, of this plan or earlier ones
    num_accepted: list[int] = field(default_factory=list)  # drafts of each run that has any
    error: Exception | None = None  # why no token could be sampled where there is none
