"""Recordings of steps (on a GPU: CUDA graphs), one for each of some sizes; a step runs in the smallest that holds it, filled up
with padding.

Recorded are decodes, by how many sequences there are; decodes with drafts, by how many sequences and the most tokens of one; and
prompts that are computed alone, by how many tokens they have.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

from torch import Tensor

from nanoengine.progress import stage
from nanoengine.recording.cpu_recorder import CannotRecord
from nanoengine.runner.stream import Recorder


def bucket_sizes(max_size: int) -> list[int]:
    """Sizes to record, ascending. The last is `max_size`. Less than half of a recorded step is padding, and less than a third of
    one of more than 16 sequences.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32), *range(512, max_size, 128)]
    return [size for size in sizes if size < max_size] + [max_size]


MOST_ON_CPU = 8
"""Sequences in a recorded step on a CPU, where every size is recorded: in larger ones, what is around the kernels is little, and
what they make, which is kept, is much."""

PROMPT_SIZES = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def prompt_sizes(max_tokens: int, max_len: int) -> list[int]:
    """Numbers of tokens to record, ascending: the host takes longer to launch such a step than the device to run it. Less than a
    third of a step of more than 128 tokens is padding.

    Args:
        max_tokens: of a step.
        max_len: of a sequence.
    """
    return [size for before, size in pairwise((0, *PROMPT_SIZES)) if size <= max_tokens and before < max_len]


def bucket_for(size: int, buckets: list[int]) -> int | None:
    """The smallest bucket that holds a batch; None if it is larger than all."""
    place = bisect_left(buckets, size)
    return buckets[place] if place < len(buckets) else None


DRAFTED_SEQS = (1, 2, 4, 8, 16)
DRAFTED_TOKENS = (4, 8, 16)
"""Numbers of sequences, and of tokens of each, that are recorded: more sequences seldom have drafts."""


def drafted_sizes(max_seqs: int, num_drafts: int) -> list[tuple[int, int]]:
    """(sequences, tokens of each) to record, ascending by all tokens."""
    longest = bucket_for(1 + num_drafts, list(DRAFTED_TOKENS)) or DRAFTED_TOKENS[-1]
    sizes = [(n, tokens) for n in DRAFTED_SEQS for tokens in DRAFTED_TOKENS if n <= max_seqs and tokens <= longest]
    return sorted(sizes, key=lambda size: (size[0] * size[1], size))


def drafted_bucket_for(size: tuple[int, int], buckets: list[tuple[int, int]]) -> tuple[int, int] | None:
    """The first bucket with as many sequences and as many tokens of each; None if there is none."""
    return next((bucket for bucket in buckets if bucket[0] >= size[0] and bucket[1] >= size[1]), None)


Size = TypeVar("Size", int, tuple[int, int])


class RecordedSteps(Generic[Size]):
    """Steps of one kind.

    Args:
        recorder: records and replays.
        buckets: sizes to record, ascending.
        choose: the bucket for a size.
        prepare: puts the numbers of a step that is all padding where `run` finds them.
        run: a step of some size up to its end, on tensors that stay where they are; returns the logits.
        name: of the kind, for a bar; None shows none.
        ahead: record all sizes now; otherwise each when it first comes.
    """

    def __init__(
        self,
        recorder: Recorder,
        buckets: list[Size],
        prepare: Callable[[Size], None],
        run: Callable[[Size], Tensor],
        name: str | None = None,
        *,
        choose: Callable[[Size, list[Size]], Size | None],
        ahead: bool = True,
    ):
        self.buckets: list[Size] = buckets
        self._choose: Callable[[Size, list[Size]], Size | None] = choose
        self._recorder, self._ahead = recorder, ahead
        self._prepare: Callable[[Size], None] = prepare
        self._run: Callable[[Size], Tensor] = run
        self._steps: dict[Size, Callable[[], Tensor]] = {}
        # The largest first: the memory that it takes does for the others.
        if not ahead:
            return
        with stage(f"Recording CUDA graphs of {name}", len(buckets), "graph", shown=name is not None) as advance:
            for size in buckets[::-1]:
                self.record(size)
                advance()

    def record(self, size: Size) -> None:
        self._prepare(size)
        self._record(size)

    def bucket_for(self, size: Size) -> Size | None:
        return self._choose(size, self.buckets)

    def replay(self, size: Size) -> Tensor | None:
        """Run the step of one of the buckets with the numbers that are there now; its logits are good until the next step.

        None: it is only now to be recorded, and cannot be.
        """
        if size not in self._steps and not self._ahead:
            try:
                self._record(size)
            except CannotRecord:
                self.buckets = []  # nor can others
                return None
        return self._steps[size]()

    def _record(self, size: Size) -> None:
        self._steps[size] = self._recorder.record(partial(self._run, size))


@dataclass
class Graphs:
    """All recordings of a runner; they share memory."""

    decodes: RecordedSteps[int]
    drafted: RecordedSteps[tuple[int, int]]
    prompts: RecordedSteps[int]

    def __len__(self) -> int:
        return len(self.decodes.buckets) + len(self.drafted.buckets) + len(self.prompts.buckets)
