"""CUDA graphs of steps: one for each of some sizes; a step runs in the smallest that holds it, filled up with padding.

Recorded are decodes, by how many sequences there are, and prompts that are computed alone, by how many tokens they have.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from torch import Tensor

from nanoengine.progress import stage
from nanoengine.runner.stream import Recorder


def bucket_sizes(max_size: int) -> list[int]:
    """Sizes to record, ascending. The last is `max_size`. Less than half of a recorded step is padding, and less than a third of
    one of more than 16 sequences.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32), *range(512, max_size, 128)]
    return [size for size in sizes if size < max_size] + [max_size]


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


class RecordedSteps:
    """Steps of one kind.

    Args:
        recorder: records and replays.
        buckets: sizes to record, ascending.
        prepare: puts the numbers of a step that is all padding where `run` finds them.
        run: a step of some size up to its end, on tensors that stay where they are; returns the logits.
        name: of the kind, for a bar; None shows none.
    """

    def __init__(
        self,
        recorder: Recorder,
        buckets: list[int],
        prepare: Callable[[int], None],
        run: Callable[[int], Tensor],
        name: str | None = None,
    ):
        self.buckets = buckets
        self._recorder, self._prepare, self._run = recorder, prepare, run
        self._steps: dict[int, Callable[[], Tensor]] = {}
        # The largest first: the memory that it takes does for the others.
        with stage(f"Recording CUDA graphs of {name}", len(buckets), "graph", shown=name is not None) as advance:
            for size in buckets[::-1]:
                self.record(size)
                advance()

    def record(self, size: int) -> None:
        self._prepare(size)
        self._steps[size] = self._recorder.record(partial(self._run, size))

    def bucket_for(self, size: int) -> int | None:
        return bucket_for(size, self.buckets)

    def replay(self, size: int) -> Tensor:
        """Run the step of one of the buckets with the numbers that are there now; its logits are good until the next step."""
        return self._steps[size]()


@dataclass
class Graphs:
    """All recordings of a runner; they share memory."""

    decodes: RecordedSteps
    prompts: RecordedSteps

    def __len__(self) -> int:
        return len(self.decodes.buckets) + len(self.prompts.buckets)
