"""Log probabilities of a prompt's own tokens, in chunks and slices of any size."""

from __future__ import annotations

import pytest
from torch import Tensor

from nanoengine.engine.messages import PromptLogprobs
from nanoengine.outputs import TokenLogprobs
from nanoengine.runner.prompt_logprobs import compute_prompt_logprobs
from nanoengine.runner.row_rules import ROWS_AT_ONCE
from tests.runner.fake_stream import FakeStream
from tests.runner.sampled_rows import random_logits

VOCAB, SIZE = 50, 8
NUM_TOKENS = 2 * ROWS_AT_ONCE + 10
PROMPT = [(7 * i + i * i) % VOCAB for i in range(NUM_TOKENS)]
HIDDEN, WEIGHT = random_logits(1, NUM_TOKENS, SIZE), random_logits(2, VOCAB, SIZE) / 3


def chunk(start: int, stop: int, count: int) -> tuple[PromptLogprobs, list[int]]:
    """Of the tokens [start, stop) of the prompt, and how many logits were there at once."""
    sizes = []

    def compute_logits(hidden: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return hidden @ WEIGHT.T

    part = compute_prompt_logprobs(
        HIDDEN[start - 1 : stop - 1],
        compute_logits,
        PROMPT[start:stop],
        count,
        row=3,
        start=start,
        stream=FakeStream(),
    )
    return part.read(), sizes


def expected(position: int) -> Tensor:
    return (HIDDEN[position - 1].double() @ WEIGHT.double().T).log_softmax(-1)


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_each_token_is_predicted_by_the_one_before(count: int) -> None:
    found, _ = chunk(1, NUM_TOKENS, count)
    assert (found.row, found.start, len(found.entries)) == (3, 1, NUM_TOKENS - 1)
    for position, entry in enumerate(found.entries, start=1):
        values = expected(position)
        token = PROMPT[position]
        assert entry.keys() == {token, *values.topk(count).indices.tolist()}
        assert entry[token].rank == 1 + int((values > values[token]).sum())
        for other, one in entry.items():
            assert one.logprob == pytest.approx(float(values[other]), abs=1e-4)


@pytest.mark.parametrize("size", [1, 7, ROWS_AT_ONCE, ROWS_AT_ONCE + 1])
def test_chunks_of_any_size_give_the_same(size: int) -> None:
    entries: list[TokenLogprobs] = []
    for start in range(1, NUM_TOKENS, size):
        found, _ = chunk(start, min(start + size, NUM_TOKENS), 3)
        assert found.start == 1 + len(entries)
        entries += found.entries
    whole, _ = chunk(1, NUM_TOKENS, 3)
    for mine, other in zip(entries, whole.entries, strict=True):
        assert mine.keys() == other.keys()
        assert [one.logprob for one in mine.values()] == pytest.approx(
            [one.logprob for one in other.values()], abs=1e-5
        )


def test_all_logits_are_never_there_at_once() -> None:
    _, sizes = chunk(1, NUM_TOKENS, 2)
    assert sum(sizes) == NUM_TOKENS - 1
    assert max(sizes) <= ROWS_AT_ONCE
