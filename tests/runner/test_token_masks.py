"""allowed_token_ids, and masks that come with a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runner.sampled_rows import Room, begin, check, random_logits, run, sampling, words_of


@settings(deadline=None, max_examples=60)
@given(data=st.data(), vocab_size=st.sampled_from([1, 2, 31, 32, 33, 64, 100, 257]))
def test_only_what_is_allowed_keeps_its_logit(data: st.DataObject, vocab_size: int) -> None:
    some = st.sets(st.integers(0, vocab_size - 1), min_size=1)
    allowed, mask = data.draw(st.none() | some), data.draw(st.none() | some)
    own = sampling(allowed_token_ids=None if allowed is None else sorted(allowed))
    logits = random_logits(vocab_size, vocab_size)
    found = check(logits, own, [0] * 3, mask)
    kept = set(range(vocab_size)) if allowed is None else allowed
    assert set(found.isfinite().nonzero()[:, 0].tolist()) == (kept if mask is None else kept & mask)


def test_only_allowed_tokens_are_drawn() -> None:
    rows = [sampling(seed=i, temperature=50.0, allowed_token_ids=[3, 7, 30]) for i in range(300)]
    tokens, _, _ = run(random_logits(1, 1, 40).expand(300, -1), rows)
    assert set(tokens) == {3, 7, 30}


def test_a_mask_stays_until_it_is_replaced_or_its_row_begins_anew() -> None:
    room, logits = Room(3, 50), random_logits(2, 1, 50)
    own = sampling(temperature=0, allowed_token_ids=[3, 4, 5])
    room.sampler.start([begin(1, own)])

    def sampled() -> int:
        return room.sample(logits.clone(), [1], [3]).read()[0][0]

    free = sampled()
    room.sampler.set_masks([(1, words_of({4, 20}, 50))])
    assert [sampled(), sampled()] == [4, 4]
    room.sampler.set_masks([(1, words_of({5, 20}, 50)), (2, words_of({1}, 50))])
    assert sampled() == 5
    room.sampler.set_masks([(1, None)])
    assert sampled() == free
    room.sampler.set_masks([(1, words_of({5}, 50))])
    room.sampler.start([begin(1, own)])
    assert sampled() == free
    room.sampler.end([1])
    room.sampler.start([begin(1, sampling(temperature=0))])
    assert sampled() == int(logits.argmax())


def test_a_row_without_any_wish_can_be_masked_and_unmasked() -> None:
    room, logits = Room(3, 50), random_logits(3, 2, 50)
    room.sampler.start([begin(row, sampling(temperature=0)) for row in (0, 2)])
    room.sampler.set_masks([(2, words_of({49}, 50))])
    assert room.sample(logits.clone(), [2, 0], [3, 3]).read()[0] == [49, int(logits[1].argmax())]
    room.sampler.set_masks([(2, None)])
    room.sample(logits.clone(), [2, 0], [3, 3])
    assert torch.equal(room.kernels.seen[-1], logits)


def test_a_mask_of_another_vocabulary_is_refused() -> None:
    room = Room(3, 50)
    room.sampler.start([begin(0, sampling())])
    with pytest.raises(AssertionError, match="a mask has 8 bytes"):
        room.sampler.set_masks([(0, words_of({1}, 80))])
