"""The two messages between policy and tensors: ScheduledBatch goes down to the runner, SampledBatch comes back.

They hold ids, lengths and token ids only: no slots, no tensors. Both can be pickled. Several batches may be on their way; they
are executed in the order in which they were made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from nanoengine.outputs import TokenLogprobs
from nanoengine.sampling_params import SamplingParams

UNKNOWN = -1
"""In place of a token id: the one that a batch before this one samples, which nobody up here has seen yet."""


class Phase(Enum):
    """What a step does: prefill computes prompts or chunks of them, decode one token of each running sequence."""

    PREFILL = "prefill"
    DECODE = "decode"


class Tier(Enum):
    """Where the K/V of a block can be."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Place(NamedTuple):
    """One block's worth of room in a tier."""

    tier: Tier
    where: int | str  # a block id of the pool, a slot of the host tier, or the path of a file


class Transfer(NamedTuple):
    """Copy the K/V of one block from one place to another."""

    source: Place
    target: Place
    header: bytes = b""  # what a file says about itself, before the K/V


@dataclass(slots=True)
class SamplingRow:
    """How one token is sampled in this step."""

    params: SamplingParams
    seed: int  # of the request and the completion: with the position, the address of the randomness
    banned_token_ids: tuple[int, ...]  # tokens that may not be chosen now, because of min_tokens


@dataclass(slots=True)
class ScheduledBatch:
    """One step: parallel lists with an entry per sequence, and the new tokens of all of them, one after the other.

    The executor keeps the newest token and the block table of each running sequence in a row of its own, so that only changes
    travel further. Tables only grow: one that is another list than before has changed anywhere.
    """

    phase: Phase
    seq_ids: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # below max_num_seqs
    token_ids: list[int] = field(default_factory=list)  # [sum(num_new_tokens)]; UNKNOWN: the newest one of its row
    num_computed_tokens: list[int] = field(default_factory=list)  # already in the KV cache
    num_new_tokens: list[int] = field(default_factory=list)
    block_tables: list[list[int]] = field(default_factory=list)  # block ids; they cover all tokens up to the new ones
    # One entry for each token to sample: a chunk that ends early samples none, a prompt that forks several.
    sampled_rows: list[int] = field(default_factory=list)  # index among the sequences of the batch
    sampled_into: list[int] = field(default_factory=list)  # row of the sequence that the token is for
    sampling: list[SamplingRow] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)  # to be done in this order before anything is computed

    def __len__(self) -> int:
        return len(self.seq_ids)


@dataclass(slots=True)
class SampledBatch:
    """The tokens sampled in one step: one per entry of `ScheduledBatch.sampling`, in that order."""

    token_ids: list[int]  # UNKNOWN where none could be sampled
    logprobs: list[TokenLogprobs | None] | None = None  # None: nobody asked for any
    unwritten: list[str] = field(default_factory=list)  # files of the batch's transfers that could not be written
    error: Exception | None = None  # why no token could be sampled where there is none
