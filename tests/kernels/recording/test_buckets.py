"""Which steps are recorded, and how a step is filled up to a bucket."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanoengine.core.device import Device
from nanoengine.core.inputs import Rows, pack
from nanoengine.core.messages import Run, StepPlan
from nanoengine.kernels.recording.buckets import (
    PROMPT_SIZES,
    Bucket,
    decode_buckets,
    drafted_buckets,
    pad,
    prompt_buckets,
    size_of,
)


def decodes(*starts: int, runs: tuple[Run, ...] = ()) -> StepPlan:
    rows = np.arange(len(starts), dtype=np.int32)
    return StepPlan(decode_rows=rows, decode_starts=np.array(starts, np.int32), runs=list(runs))


def make_rows() -> Rows:
    rows = Rows(6, 1, 8, Device(torch.device("cpu")))
    rows.token_ids[5] = list(range(100, 140))
    return rows


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 100, 256, 1000])
def test_little_of_a_recorded_decode_is_padding(most: int) -> None:
    buckets = decode_buckets(most)
    for size in range(1, most + 1):
        found = next(own for own in buckets if own.holds(Bucket(False, size, 1)))
        assert found.num_runs < 2 * size
        assert size <= 16 or 3 * (found.num_runs - size) < found.num_runs
    assert buckets[-1].num_runs == most


def test_prompts_up_to_a_length_are_recorded() -> None:
    assert [own.num_tokens for own in prompt_buckets(4096, 4096)] == list(PROMPT_SIZES)
    assert [own.num_tokens for own in prompt_buckets(500, 200)] == [128, 192, 256]


@pytest.mark.parametrize(("max_len", "num_tokens"), [(4096, 100), (128, 128), (100, 90)])
def test_only_prompts_without_history_run_in_their_own_buckets(max_len: int, num_tokens: int) -> None:
    """The bounds of a recording say of which kind it is, whatever is the longest sequence."""
    buckets = prompt_buckets(4096, max_len, whole=True)
    for whole in (True, False):
        found = next(own for own in buckets if own.holds(Bucket(True, 1, num_tokens, whole)))
        shape = found.shape(max_len)
        assert found.whole == whole == (shape.seq_lens == shape.query_lens)
    assert prompt_buckets(4096, max_len)[0].holds(Bucket(True, 1, num_tokens, whole=True))


def test_drafted_buckets_hold_every_size_below_the_largest() -> None:
    buckets = drafted_buckets(5, 7)
    assert buckets == sorted(buckets, key=lambda own: own.num_runs * own.num_tokens)
    for num_seqs in range(1, 5):
        for tokens in range(2, 9):
            found = next(own for own in buckets if own.holds(Bucket(False, num_seqs, tokens)))
            assert (found.num_runs >= num_seqs, found.num_tokens >= tokens) == (True, True)
    assert not any(own.holds(Bucket(False, 1, 1)) or own.holds(Bucket(True, 1, 4)) for own in buckets)


def test_only_steps_of_one_kind_have_a_size() -> None:
    drafted, chunk = Run(4, 9, 3, True, (1, 2)), Run(5, 0, 7, True)
    assert size_of(decodes(3, 4)) == Bucket(False, 2, 1)
    assert size_of(decodes(3, 4, runs=(drafted,))) == Bucket(False, 3, 3)
    assert size_of(StepPlan(runs=[chunk])) == Bucket(True, 1, 7, whole=True)
    assert size_of(StepPlan(runs=[chunk._replace(start=3)])) == Bucket(True, 1, 7)
    assert size_of(StepPlan(runs=[chunk, chunk])) is None
    assert size_of(decodes(3, runs=(chunk,))) is None
    assert size_of(decodes(3, runs=(drafted, chunk))) is None


@pytest.mark.parametrize(
    ("plan", "bucket"),
    [
        (decodes(3, 4, 9), Bucket(False, 5, 1)),
        (decodes(3, runs=(Run(4, 9, 3, True, (1, 2)),)), Bucket(False, 2, 4)),
        (decodes(3, runs=(Run(4, 9, 3, True, (1, 2)),)), Bucket(False, 4, 8)),
        (StepPlan(runs=[Run(5, 2, 7, True)]), Bucket(True, 1, 12)),
        (StepPlan(runs=[Run(5, 2, 7, False)]), Bucket(True, 1, 7)),
    ],
)
def test_padding_keeps_the_step_and_adds_runs_of_the_padding_row(plan: StepPlan, bucket: Bucket) -> None:
    rows = make_rows()
    own, shape = pack(plan, rows), bucket.shape(128)
    padded = pad(own, shape, rows)
    assert padded.numbers.numel() == shape.sections[-1].stop
    row, computed, starts, token_ids, _, sampled_rows, positions = (padded.numbers[part] for part in shape.sections)
    before = [own.numbers[part] for part in own.sections]
    count, num_tokens, num_samples = len(before[0]), own.num_tokens, own.num_samples
    for section, found in zip(before, (row, computed, starts, token_ids), strict=False):
        assert torch.equal(found[: len(section)], section)
    assert (row[count:] == rows.padding_row).all()
    assert (sampled_rows[num_samples:] == rows.padding_row).all()
    assert torch.equal(positions[:num_samples], before[6])
    assert (token_ids[num_tokens:] == 0).all()
    assert starts[-1] == shape.num_tokens
    assert (starts.diff() >= 0).all()
    if bucket.num_tokens == 1:
        assert (starts.diff() == 1).all()
    assert [part.tolist() for part in padded.sampled] == [part.tolist() for part in own.sampled]
