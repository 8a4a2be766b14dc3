"""Pieces of rows: which samples they are for, and that they are sent only when something has changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nanoengine.features.sampling.row_processor import RowProcessor
from tests.features.sampling.rows import Bench, TestDevice, begin, random_logits, sampling


class Pieces(RowProcessor[int]):
    def pack(self, numbers: np.ndarray, pieces: list[int]) -> Sequence[np.ndarray]:
        return numbers, np.array(pieces, dtype=np.int64)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_a_steady_step_sends_nothing() -> None:
    device = TestDevice()
    pieces = Pieces(6, device)
    pieces.put(2, 5)
    rows = ints(0, 2, 1)
    first = pieces.send(np.array([1]), rows)
    assert device.num_sent == 2
    assert pieces.send(np.array([1]), rows) is first
    pieces.put(3, 7)
    pieces.end([3])
    assert pieces.send(np.array([1]), ints(5, 2, 4))[1].tolist() == [5]
    assert device.num_sent == 4


def test_a_step_of_rows_that_ask_for_nothing_changes_no_logits_and_sends_nothing() -> None:
    bench, logits = Bench(4, 20), random_logits(3, 3, 20)
    everything = sampling(logprobs=1, repetition_penalty=2, logit_bias={1: 1}, allowed_token_ids=[1])
    bench.start(*(begin(row, sampling(temperature=0)) for row in range(3)), begin(3, everything))
    device = bench.device
    assert isinstance(device, TestDevice)
    num_sent = device.num_sent
    samples = bench.sample(logits, [2, 0, 1], [5, 5, 5], padding=2)
    assert device.num_sent == num_sent
    assert not any(len(own.find(ints(2, 0, 1), ints(5, 5, 5))) for own in bench.sampler.processors)
    assert (bench.seen[0][:3] == logits).all()
    assert (samples.token_ids, samples.extras) == (logits.argmax(-1).tolist(), {})
