"""Which sizes are recorded, which one a batch runs in, and that it is the right recording that is replayed."""

from __future__ import annotations

import pytest
import torch

from nanoengine.runner.graphs import RecordedSteps, bucket_for, bucket_sizes
from tests.runner.fake_stream import FakeStream

MAXIMA = [*range(1, 601), 1000, 1024, 2049]


def test_buckets_ascend_to_the_maximum() -> None:
    for max_size in MAXIMA:
        buckets = bucket_sizes(max_size)
        assert buckets == sorted(set(buckets))
        assert buckets[0] == 1
        assert buckets[-1] == max_size


def test_every_size_has_the_smallest_bucket_that_holds_it() -> None:
    for max_size in MAXIMA:
        buckets = bucket_sizes(max_size)
        for size in range(1, max_size + 1):
            assert bucket_for(size, buckets) == min(bucket for bucket in buckets if bucket >= size)
        for size in (max_size + 1, 10 * max_size):
            assert bucket_for(size, buckets) is None


def test_little_of_a_bucket_is_padding() -> None:
    for max_size in MAXIMA:
        buckets = bucket_sizes(max_size)
        for size in range(1, max_size + 1):
            bucket = bucket_for(size, buckets)
            assert bucket is not None
            assert bucket - size < bucket / 2
            if size > 16:
                assert bucket - size < bucket / 3


def test_common_sizes() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(2) == [1, 2]
    assert bucket_sizes(3) == [1, 2, 3]
    assert bucket_sizes(8) == [1, 2, 4, 8]
    assert bucket_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert bucket_sizes(256)[-3:] == [192, 224, 256]
    assert len(bucket_sizes(256)) < 25
    assert bucket_sizes(600)[-3:] == [480, 512, 600]


def test_without_buckets_no_size_has_one() -> None:
    assert bucket_for(1, []) is None


class Steps:
    """Steps whose logits are size * 1000 and the number that was there when they ran."""

    def __init__(self) -> None:
        self.stream = FakeStream(can_record=True)
        self.number = torch.zeros(1, dtype=torch.int64)
        self.calls: list[tuple[str, int]] = []

    def prepare(self, size: int) -> None:
        self.calls.append(("prepare", size))

    def run(self, size: int) -> torch.Tensor:
        self.calls.append(("run", size))
        return self.number.expand(size) + 1000 * size

    def graphs(self, buckets: list[int]) -> RecordedSteps:
        return RecordedSteps(self.stream.recorder(), buckets, self.prepare, self.run, choose=bucket_for)


def test_the_largest_is_recorded_first_and_each_on_padding() -> None:
    steps = Steps()
    graphs = steps.graphs([1, 2, 5])
    assert graphs.buckets == [1, 2, 5]
    recorded = [call for size in (5, 2, 1) for call in (("prepare", size), ("run", size), ("run", size))]
    assert steps.calls == recorded  # they run to warm up, and to be recorded
    assert len(steps.stream.recordings) == 3


def test_the_step_of_a_size_is_replayed_with_the_numbers_that_are_there() -> None:
    steps = Steps()
    graphs = steps.graphs([1, 2, 5])
    for number, size in enumerate((2, 5, 2, 1, 2)):
        steps.number.fill_(number)
        assert graphs.replay(size).tolist() == [1000 * size + number] * size
    assert [recording.num_replays for recording in steps.stream.recordings] == [1, 3, 1]


def test_sizes_may_be_recorded_one_by_one() -> None:
    steps = Steps()
    graphs = steps.graphs([])
    graphs.record(3)
    assert steps.calls == [("prepare", 3), ("run", 3), ("run", 3)]
    assert graphs.replay(3).tolist() == [3000] * 3


def test_a_size_that_was_not_recorded_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        Steps().graphs([1, 2]).replay(3)


def test_a_step_that_cannot_be_recorded_is_an_error() -> None:
    steps = Steps()

    def broken(size: int) -> torch.Tensor:
        raise RuntimeError(f"no step of {size}")

    with pytest.raises(RuntimeError, match="no step of 2"):
        RecordedSteps(steps.stream.recorder(), [1, 2], steps.prepare, broken, choose=bucket_for)


def test_a_bar_is_shown_only_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    steps = Steps()
    steps.graphs([1, 2])
    assert capsys.readouterr().err == ""
    RecordedSteps(steps.stream.recorder(), [1, 2], steps.prepare, steps.run, "decodes", choose=bucket_for)
    assert "Recording CUDA graphs" in capsys.readouterr().err
