"""Streams: order, events and host memory; and that the one which tests use is as late as it says."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from nanoengine.runner.stream import CpuStream, CudaStream, Stream, open_stream, send
from tests.runner.fake_stream import GARBAGE, FakeStream

CPU = torch.device("cpu")

every_stream = pytest.mark.parametrize("stream", [CpuStream(), FakeStream()], ids=lambda stream: type(stream).__name__)


def note(done: list[int], *numbers: int) -> list[Callable[[], None]]:
    """Pieces of work that write down their numbers."""
    return [lambda number=number: done.append(number) for number in numbers]  # type: ignore[misc]


def give(stream: Stream, *works: Callable[[], object]) -> None:
    for work in works:
        stream.run(work)


def fail(message: str) -> Callable[[], None]:
    def work() -> None:
        raise RuntimeError(message)

    return work


# ---- the CPU


def test_the_stream_of_a_device() -> None:
    assert isinstance(open_stream(CPU), CpuStream)
    stream = open_stream(torch.device("cuda", 3))
    assert isinstance(stream, CudaStream)
    assert stream.torch_device == torch.device("cuda", 3)
    assert stream.can_record


def test_a_cpu_does_work_in_order_and_at_once() -> None:
    stream, done = CpuStream(), []
    for number in range(3):
        stream.run(note(done, number)[0])
        assert done == list(range(number + 1))
        stream.event().wait()


def test_errors_on_a_cpu_are_raised_at_once() -> None:
    stream = CpuStream()
    with pytest.raises(RuntimeError, match="broken"):
        stream.run(fail("broken"))
    stream.event().wait()


def test_a_cpu_records_steps_as_they_come() -> None:
    assert CpuStream.can_record
    assert not CpuStream.records_ahead
    place = torch.ones(2)
    replay = CpuStream().recorder().record(lambda: place * 2)
    place.fill_(4)
    assert replay().tolist() == [8, 8]


@every_stream
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_host_memory_is_what_was_asked_for(stream: Stream, dtype: torch.dtype) -> None:
    first, second = stream.host_tensor(5, dtype), stream.host_tensor(5, dtype)
    assert first.shape == (5,)
    assert first.dtype == dtype
    assert first.device == CPU
    assert first.data_ptr() != second.data_ptr()


@every_stream
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_what_is_sent_arrives(stream: Stream, dtype: type, count: int) -> None:
    values = (np.arange(count) * 3 - 7).astype(dtype)
    sent = send(values, stream)
    expected = values.copy()
    values[:] = 9  # the host goes on
    assert sent.device == stream.torch_device
    assert sent.numpy().dtype == dtype
    assert np.array_equal(sent.numpy(), expected)


# ---- the late stream


def test_late_work_is_done_when_it_is_waited_for_and_no_further() -> None:
    stream, done = FakeStream(), []
    give(stream, *note(done, 0, 1))
    two = stream.event()
    give(stream, *note(done, 2))
    three = stream.event()
    give(stream, *note(done, 3))
    assert done == []
    two.wait()
    assert done == [0, 1]
    two.wait()
    assert done == [0, 1]
    three.wait()
    assert done == [0, 1, 2]
    assert stream.num_done == 3
    two.wait()
    stream.event().wait()
    assert done == [0, 1, 2, 3]


def test_an_event_before_all_work_is_reached() -> None:
    stream, done = FakeStream(), []
    event = stream.event()
    give(stream, *note(done, 0))
    event.wait()
    assert done == []


def test_host_memory_of_the_late_stream_begins_as_garbage() -> None:
    for dtype in (torch.int32, torch.int64, torch.float32):
        assert FakeStream().host_tensor(3, dtype).tolist() == [GARBAGE] * 3


def test_work_that_overlaps_is_counted() -> None:
    stream, done = FakeStream(), []
    for number in range(3):
        give(stream, *note(done, number))
        stream.event().wait()
    assert stream.num_overlapping == 0
    give(stream, *note(done, 3, 4, 5))
    assert stream.num_overlapping == 2


@pytest.mark.parametrize("seed", range(5))
def test_a_late_stream_may_advance_unasked_and_keeps_the_order(seed: int) -> None:
    stream, done = FakeStream(seed=seed), []
    early = 0
    for number in range(100):
        give(stream, *note(done, number))
        early += bool(done and done[-1] == number)
        assert done == list(range(stream.num_done))
    assert 0 < early < 100
    assert 0 < stream.num_overlapping < 100
    stream.event().wait()
    assert done == list(range(100))


def test_the_same_seed_advances_alike() -> None:
    counts = []
    for _ in range(2):
        stream = FakeStream(seed=7)
        counts.append([])
        for _ in range(50):
            stream.run(lambda: None)
            counts[-1].append(stream.num_done)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("early", [False, True], ids=["waited for", "unasked"])
def test_a_late_error_surfaces_once_and_behind_its_work(early: bool) -> None:
    stream, done = FakeStream(), []
    give(stream, *note(done, 0))
    before = stream.event()
    give(stream, fail("broken"))
    behind = stream.event()
    give(stream, *note(done, 2))
    after = stream.event()
    if early:
        stream.advance(3)
    before.wait()
    with pytest.raises(RuntimeError, match="broken"):
        behind.wait()
    assert done == [0], "nothing behind an error that nobody has seen"
    behind.wait()
    after.wait()
    assert done == [0, 2]


def test_a_late_error_surfaces_in_any_event_behind_it() -> None:
    stream, done = FakeStream(), []
    give(stream, fail("first"), *note(done, 1), fail("second"))
    end = stream.event()
    for message in ("first", "second"):
        with pytest.raises(RuntimeError, match=message):
            end.wait()
    end.wait()
    assert done == [1]


def test_recorded_work_is_called_again_and_counted() -> None:
    stream = FakeStream(can_record=True)
    assert stream.can_record
    assert not FakeStream().can_record
    calls, source = [], torch.zeros(2)

    def work() -> torch.Tensor:
        calls.append(source.tolist())
        return source + 1

    replay = stream.recorder().record(work)
    other = stream.recorder().record(lambda: source * 2)
    assert calls == [[0, 0]] * 2, "to warm up, and to record"
    source.fill_(5)
    result = replay()
    assert result.tolist() == [6, 6]
    source.fill_(8)
    assert replay() is result
    assert result.tolist() == [9, 9]
    assert other().tolist() == [16, 16]
    assert [recording.num_replays for recording in stream.recordings] == [2, 1]
