"""A row's outputs depend on the row alone: not on the batch, nor on the engine that computes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.builder import read_config
from nanoengine.ray.batch import Completer

OPTIONS = {"device": "cpu", "num_threads": 1, "max_model_len": 200, "num_kv_blocks": 60}
PARAMS = SamplingParams(max_tokens=9, temperature=1.0)
PROMPTS = [f"def number_{count}(" for count in range(6)]
NO_SEEDS = [None] * 100


def completer(params: SamplingParams | None = PARAMS, seed: int = 0) -> Completer:
    return Completer(read_config("demo", OPTIONS), params, seed=seed)


def test_the_outputs_are_those_of_one_engine() -> None:
    greedy = replace(PARAMS, temperature=0.0)
    rows = completer(greedy).complete(PROMPTS, NO_SEEDS[: len(PROMPTS)])
    with LLM("demo", use_tqdm=False, **OPTIONS) as llm:
        want = [output.outputs[0] for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]
        tokens = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert [row["token_ids"] for row in rows] == [own.token_ids for own in want]
    assert [row["text"] for row in rows] == [own.text for own in want]
    assert {row["finish_reason"] for row in rows} <= {"length", "stop"}
    assert all(row["error"] is None for row in rows)
    assert completer(greedy).complete(tokens, NO_SEEDS[: len(tokens)]) == rows, "token ids are prompts, too"


def test_batches_and_engines_do_not_matter() -> None:
    own = completer()
    whole = own.complete(PROMPTS, NO_SEEDS[: len(PROMPTS)])
    assert [own.complete([prompt], [None])[0] for prompt in PROMPTS] == whole
    assert completer().complete(PROMPTS[::-1], NO_SEEDS[: len(PROMPTS)])[::-1] == whole
    assert completer(seed=1).complete(PROMPTS, NO_SEEDS[: len(PROMPTS)]) != whole
    same = own.complete(PROMPTS[:1] * 8, list(range(8)))
    assert len({row["text"] for row in same}) > 1, "a seed of its own for each"
    fixed = completer(replace(PARAMS, seed=3)).complete(PROMPTS[:1] * 2, [None, 4])
    assert fixed[0] == own.complete(PROMPTS[:1], [3])[0]
    assert fixed[1] == own.complete(PROMPTS[:1], [4])[0]


def test_an_error_is_its_row_s_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = completer()
    want = own.complete(PROMPTS[:2], NO_SEEDS[:2])
    rows = own.complete([PROMPTS[0], "", None, "long " * 300, [-1], PROMPTS[1]], [*NO_SEEDS[:5], None])
    assert [rows[0], rows[5]] == want
    names = ["empty", "must be a string or a list of token ids", "max_model_len", "token ids are integers"]
    for row, name in zip(rows[1:5], names, strict=True):
        assert row["error"].startswith(("InvalidPrompt: ", "PromptTooLong: "))
        assert name in row["error"]
        assert row["text"] is row["token_ids"] is row["finish_reason"] is None
    assert "seed" in own.complete(PROMPTS[:1], ["x"])[0]["error"]

    tokenizer = own.engine.tokenizer
    real = tokenizer.decode

    def break_one(token_ids: list[int], **rest: Any) -> str:
        if token_ids[-1:] == want[0]["token_ids"][2:3]:
            raise ValueError("no text for it")
        return real(token_ids, **rest)

    monkeypatch.setattr(tokenizer, "decode", break_one)
    broken = own.complete([PROMPTS[0]], [None])[0]
    assert broken["error"] == "ValueError: no text for it"
    assert broken["finish_reason"] == "error"
