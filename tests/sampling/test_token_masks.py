"""allowed_token_ids, and masks that come with a step."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling.rows import Bench, begin, check, random_logits, run, sampling


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
    tokens = run(random_logits(1, 1, 40).expand(300, -1), rows).token_ids
    assert set(tokens) == {3, 7, 30}


def test_a_mask_stays_until_it_is_replaced_or_its_row_begins_anew() -> None:
    bench, logits = Bench(3, 50), random_logits(2, 1, 50)
    own = sampling(temperature=0, allowed_token_ids=[3, 4, 5])
    bench.start(begin(1, own))

    def sampled() -> int:
        return bench.sample(logits.clone(), [1], [3]).token_ids[0]

    free = sampled()
    bench.start(masks={1: {4, 20}})
    assert [sampled(), sampled()] == [4, 4]
    bench.start(masks={1: {5, 20}, 2: {1}})
    assert sampled() == 5
    bench.start(masks={1: None})
    assert sampled() == free
    bench.start(masks={1: {5}})
    bench.start(begin(1, own))
    assert sampled() == free
    bench.start(ended=[1])
    bench.start(begin(1, sampling(temperature=0)))
    assert sampled() == int(logits.argmax())


def test_a_row_without_any_wish_can_be_masked_and_unmasked() -> None:
    bench, logits = Bench(3, 50), random_logits(3, 2, 50)
    bench.start(*(begin(row, sampling(temperature=0)) for row in (0, 2)))
    bench.start(masks={2: {49}})
    assert bench.sample(logits.clone(), [2, 0], [3, 3]).token_ids == [49, int(logits[1].argmax())]
    bench.start(masks={2: None})
    bench.sample(logits.clone(), [2, 0], [3, 3])
    assert torch.equal(bench.seen[-1], logits)
