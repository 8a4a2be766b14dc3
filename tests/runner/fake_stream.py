"""A stream on which time passes: work is queued, and done when somebody waits for it, or some time before."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from nanoengine.runner.stream import Event, Recorder

GARBAGE = -12345


class FakeStream:
    """A late device on the CPU.

    Work that raises counts as done. Its error is kept, and nothing more is done, until somebody waits for an event behind it.

    Args:
        can_record: whether decode steps are recorded, as CUDA graphs are.
        seed: if given, the device advances by some pieces of work whenever it is given one, unasked.

    Attributes:
        num_done: pieces of work that are over.
        num_overlapping: pieces of work that were given while others were not done.
        recordings: in the order in which they were made.
    """

    torch_device = torch.device("cpu")

    records_ahead = True

    def __init__(self, *, can_record: bool = False, seed: int | None = None):
        self.can_record = can_record
        self.queue: deque[Callable[[], object]] = deque()
        self.num_done = 0
        self.num_overlapping = 0
        self.recordings: list[Recording] = []
        self._draw = None if seed is None else random.Random(seed)
        self._error: Exception | None = None  # of the piece that was done last

    def run(self, work: Callable[[], object]) -> None:
        self.num_overlapping += bool(self.queue)
        self.queue.append(work)
        if self._draw is not None:
            self.advance(self.num_done + self._draw.randint(0, len(self.queue)))

    def advance(self, until: int) -> None:
        """Do work until so many pieces of it have been done, or one has raised."""
        while self.num_done < until and self._error is None:
            self.num_done += 1
            try:
                self.queue.popleft()()
            except Exception as error:
                self._error = error

    def event(self) -> Event:
        return _Place(self, self.num_done + len(self.queue))

    def wait(self, until: int) -> None:
        self.advance(until)
        if self._error is not None and self.num_done <= until:
            error, self._error = self._error, None
            raise error

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.full((size,), GARBAGE if dtype.is_signed else 0xAB, dtype=dtype)

    def recorder(self) -> Recorder:
        return _Recorder(self)


class _Place:
    def __init__(self, stream: FakeStream, until: int):
        self.stream, self.until = stream, until

    def wait(self) -> None:
        self.stream.wait(self.until)


class Recording:
    """Recorded work. Its result is one tensor, written anew each time, as that of a CUDA graph is."""

    def __init__(self, work: Callable[[], Tensor]):
        self.work = work
        self.result = work()
        self.num_replays = 0

    def __call__(self) -> Tensor:
        self.num_replays += 1
        self.result.copy_(self.work())
        return self.result


class _Recorder:
    def __init__(self, stream: FakeStream):
        self.stream = stream

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        work()  # the warm-up
        self.stream.recordings.append(Recording(work))
        return self.stream.recordings[-1]
