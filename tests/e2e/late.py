"""A device on which time passes: work is queued, and done when somebody waits for it, or some time before."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoengine.core import startup as startup_module
from nanoengine.core.device import Device
from nanoengine.core.startup import Startup
from nanoengine.kernels.recording import capability as recording
from nanoengine.kernels.recording.options import RecordingOptions
from nanoengine.kernels.recording.recorded_steps import RecordedSteps, Recorder

GARBAGE = -12345


class LateDevice(Device):
    """It computes on the CPU, late. Host memory begins as garbage.

    Work that raises counts as done. Its error is kept, and nothing more is done, until somebody waits for an event behind it.

    Args:
        seed: if given, the device advances by some pieces of work whenever it is given one, unasked.

    Attributes:
        num_done: pieces of work that are over.
        num_overlapping: pieces of work that were given while others were not done.
        recordings: in the order in which they were made.
    """

    def __init__(self, seed: int | None = None):
        super().__init__(torch.device("cpu"))
        self.queue: deque[Callable[[], object]] = deque()
        self.num_done = self.num_overlapping = 0
        self.recordings: list[Recording] = []
        self._draw = None if seed is None else random.Random(seed)
        self._error: Exception | None = None  # of the piece that was done last

    def run(self, work: Callable[[], object]) -> Callable[[], None]:
        self.num_overlapping += bool(self.queue)
        self.queue.append(work)
        if self._draw is not None:
            self.advance(self.num_done + self._draw.randint(0, len(self.queue)))
        return partial(self.wait_until, self.num_done + len(self.queue))

    def advance(self, until: int) -> None:
        """Do work until so many pieces of it have been done, or one has raised."""
        while self.num_done < until and self._error is None:
            self.num_done += 1
            try:
                self.queue.popleft()()
            except Exception as error:
                self._error = error

    def wait_until(self, until: int) -> None:
        self.advance(until)
        if self._error is not None and self.num_done <= until:
            error, self._error = self._error, None
            raise error

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.full((size,), GARBAGE if dtype.is_signed else 0xAB, dtype=dtype)

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        work()  # the warm-up
        self.recordings.append(Recording(work))
        return self.recordings[-1]

    records_ahead = True  # as a `Recorder` of CUDA graphs says of itself


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


@contextmanager
def late_device(*, can_record: bool = False, seed: int | None = None) -> Iterator[LateDevice]:
    """Engines made here run on such a device. If it can record, it records the steps that a GPU does, whatever their kernels."""
    device = LateDevice(seed)

    def is_wanted(_: object, startup: Startup) -> bool:
        return not (startup.config.of(RecordingOptions).enforce_eager or startup.runs_eagerly)

    def recorder(_: torch.device) -> Recorder:
        return device

    buckets, record = recording.Recording._buckets, recording.Recording._record

    def as_on_a_gpu(own: recording.Recording, startup: Startup, **_: Any) -> Any:
        return buckets(own, startup, on_cpu=False)

    def record_ahead(own: recording.Recording, startup: Startup) -> RecordedSteps:
        steps = record(own, startup)
        steps.record_all(use_tqdm=False)
        return steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup_module, "open_device", lambda _: device)
        if can_record:
            patch.setattr(recording, "_recorder", recorder)
            patch.setattr(recording.Recording, "_can_record", is_wanted)
            patch.setattr(recording.Recording, "_buckets", as_on_a_gpu)
            patch.setattr(recording.Recording, "_record", record_ahead)
        yield device
