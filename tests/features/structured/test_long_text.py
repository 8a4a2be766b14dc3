"""What a step does for a grammar is bounded: of a long text, for completions in one state, and where a mask takes long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.core.sequence import Request
from nanoengine.features.structured import mask_filling
from nanoengine.features.structured.constraint import Constraint
from nanoengine.features.structured.long_text import MAX_FORCED, LongText
from nanoengine.features.structured.mask_filling import GrammarPolicy

WORDS = "one two, thr\u00e9\u00e9 \U0001f99c "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", use_tqdm=False, max_model_len=200, num_kv_blocks=300, device="cpu") as own:
        yield own


def asked(llm: LLM, outputs: dict[str, Any] | None, **params: Any) -> Request:
    values = {"seed": 1, "max_tokens": 100, **params, "structured_outputs": outputs}
    request = llm.engine.make_request("def f", SamplingParams(**values))
    llm.engine.submit(request)
    return request


def finish(llm: LLM, *requests: Request) -> list[str]:
    while not all(request.finished for request in requests):
        llm.engine.step()
    return [own.text for request in requests for own in request.output().outputs]


@pytest.mark.parametrize(
    "of",
    [
        lambda text: {"json": {"const": text}},
        lambda text: {"choice": [text]},
        lambda text: {"regex": text},
        lambda text: {"json": {"type": "object", "properties": {"a": {"const": text}}, "required": ["a"]}},
    ],
    ids=["const", "choice", "regex", "property"],
)
def test_a_long_text_costs_what_is_used_of_it_for_all_completions_once(
    llm: LLM, of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, counts = LongText.tokens, []

    def counted(own: LongText, *args: Any) -> Any:
        counts.append(tokens(own, *args))
        return counts[-1]

    monkeypatch.setattr(LongText, "tokens", counted)
    work = []
    for count, n in ((300, 1), (3000, 1), (3000, 4)):
        text = WORDS * count
        counts.clear()
        for said in finish(llm, asked(llm, of(text), n=n)):
            said = said.removeprefix('{"a": ').lstrip('"').rstrip("\ufffd")
            assert len(said) > 100
            assert said == text[: len(said)]
        assert all(len(own) <= MAX_FORCED for own in counts if own is not None)
        work.append(len(counts))
    assert work[1] <= work[0] + 2
    assert work[2] <= work[1] + 8, "four completions in one state share"


def test_the_end_of_a_long_text_is_as_of_a_short_one(llm: LLM) -> None:
    text = WORDS * 20
    assert MAX_FORCED < len(text.encode()) < 2 * MAX_FORCED
    long = {"choice": [text + "a", text + "b"]}
    for speculate in (True, False):
        [said] = finish(llm, asked(llm, long, max_tokens=1000, speculate=speculate))
        assert said[:-1] == text[: len(said) - 1]
    assert finish(llm, asked(llm, long, speculate=True)) == finish(llm, asked(llm, long, speculate=False))


def test_nobody_waits_for_a_mask_that_takes_long(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = {"regex": "[0-9]{90}"}
    alone, said = finish(llm, asked(llm, None)), finish(llm, asked(llm, digits, n=2))
    part = next(own for own in llm.engine.scheduler.parts if isinstance(own, GrammarPolicy))
    ready, fill, num_filled = threading.Event(), Constraint.fill_ahead, []

    def late(own: Constraint, num_words: int) -> Any:
        assert ready.wait(60)
        num_filled.append(own)
        return fill(own, num_words)

    monkeypatch.setattr(Constraint, "fill_ahead", late)
    monkeypatch.setattr(mask_filling, "MAX_WAIT", 0.0)
    slow = asked(llm, digits, n=2)
    llm.engine.step()
    llm.engine.step()
    for own in part.constraints.values():
        own.is_watched = True
    part._fill_ahead(list(part.constraints))
    assert finish(llm, asked(llm, None)) == alone
    assert not slow.finished
    assert not num_filled
    ready.set()
    assert finish(llm, slow) == said
    assert num_filled
