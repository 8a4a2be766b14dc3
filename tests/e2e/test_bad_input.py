"""Every mistake of a user has a name, and the engine is as good afterwards as before; what is allowed, works at its limits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine import LLM, RequestOutput, SamplingParams
from nanoengine.errors import (
    InvalidPrompt,
    InvalidSamplingParams,
    NanoEngineError,
    NotFiniteLogits,
    StepFailed,
    UnsupportedModel,
)
from tests.e2e.small_engine import GREEDY, MAX_LEN, NEW, PROMPTS, VOCAB_SIZE, assert_idle, generate, open_llm, sabotage


@pytest.fixture(scope="module")
def shared(tiny: Path) -> Iterator[LLM]:
    """Refusals leave it as it was."""
    with open_llm(tiny) as llm:
        expected = generate(llm, PROMPTS)
        yield llm
        assert generate(llm, PROMPTS) == expected


Call = Callable[[LLM], object]


def generating(prompt: Any, params: Any = GREEDY, **options: Any) -> Call:
    return lambda llm: llm.generate(prompt, params, use_tqdm=False, **options)


def asking(**params: Any) -> Call:
    return generating("a", SamplingParams(**params))


def streaming(prompt: Any, **params: Any) -> Call:
    return lambda llm: llm.stream(prompt, SamplingParams(**params))


def chatting(messages: Any) -> Call:
    """The tiny tokenizer has no chat template."""
    return lambda llm: llm.chat(messages, use_tqdm=False)


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "empty"),
    ([[]], "empty"),
    ([VOCAB_SIZE], "holds 300: .*0 to 299"),
    ([[5, [6]]], r"\[6\]"),
    ([1] * MAX_LEN, "is too long: this model's maximum context length is 64 tokens, and it has 64: 63 leave room"),
    ("half a pair: \ud800", "not valid Unicode"),
    (["fine", "\udfff"], "not valid Unicode"),
    (["fine", 5], "int"),
    (b"bytes", "bytes"),
    (None, "NoneType"),
    ({"text": "hello"}, "a prompt has the keys \\['text'\\]"),
    (iter(["a"]), "iterator"),
    (np.array([1, 2]), "ndarray"),
    (torch.tensor([1, 2]), "Tensor"),
]
TWO = ["a", "b"]
NO_PARAMS: list[Any] = [[GREEDY, {"temperature": 0}], {"temperature": 0}, [None, "greedy"], 5]
REFUSED: list[tuple[Call, type[NanoEngineError], str]] = [
    *((generating(prompt), InvalidPrompt, message) for prompt, message in BAD_PROMPTS),
    *((generating(TWO, [GREEDY] * n), InvalidSamplingParams, f"{n} entries for 2 prompts") for n in (0, 1, 3)),
    *((generating(TWO, params), InvalidSamplingParams, "sampling_params") for params in NO_PARAMS),
    *((generating("x", cache_salt=salt), NanoEngineError, "cache_salt") for salt in (5, None, b"a", "\ud800")),
    (asking(stop_token_ids=[5, 300]), InvalidSamplingParams, "stop_token_ids holds 300"),
    (asking(allowed_token_ids=[5, 300]), InvalidSamplingParams, "allowed_token_ids holds 300"),
    (asking(logit_bias={300: 1.0}), InvalidSamplingParams, "logit_bias holds 300"),
    (asking(allowed_token_ids=[7], min_tokens=2, stop_token_ids=[7]), InvalidSamplingParams, "allowed_token_ids"),
    (asking(min_tokens=64), InvalidSamplingParams, "min_tokens"),
    (streaming("a", n=2), InvalidSamplingParams, "ask for 2 completions"),
    (streaming("a", best_of=3), InvalidSamplingParams, "ask for 3 completions"),
    (streaming(""), InvalidPrompt, "empty"),
    (chatting([{"role": "user", "content": "x"}]), InvalidPrompt, "chat template"),
    (chatting([[{"role": "user", "content": "x"}]]), InvalidPrompt, "chat template"),
    (chatting({"role": "user"}), InvalidPrompt, "messages must be a list"),
    *((chatting(messages), InvalidPrompt, "messages holds") for messages in ([1], [None], [[{"role": "user"}], 1])),
    *(
        (lambda llm, own=own: llm.stream("a", own), InvalidSamplingParams, "sampling_params must be")
        for own in (1, "x", {})
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_a_mistake_is_refused_by_name_before_anything_runs(
    shared: LLM, monkeypatch: pytest.MonkeyPatch, call: Call, error: type[NanoEngineError], message: str
) -> None:
    sabotage(shared, monkeypatch, lambda *_: pytest.fail("something ran"))
    with pytest.raises(error, match=message):
        call(shared)
    assert_idle(shared)


EXTREME: list[dict[str, Any]] = [
    {"top_k": 2**31 - 1},
    {"top_k": 1},
    {"seed": 2**64 - 1},
    {"seed": -(2**63)},
    {"temperature": 100.0},
    {"temperature": 1e-300},
    {"top_p": 1e-300},
    {"min_p": 1.0},
    {"max_tokens": 2**31 - 1},
    {"min_tokens": 60, "max_tokens": None},
    {"presence_penalty": 2.0, "frequency_penalty": -2.0, "repetition_penalty": 2.0},
    {"repetition_penalty": 0.01},
    {"logit_bias": {i: 100.0 * (-1) ** i for i in range(300)}},
    {"allowed_token_ids": [299]},
    {"allowed_token_ids": range(300)},
    {"stop_token_ids": range(300)},
    {"logprobs": 20, "prompt_logprobs": 20},
    {"n": 7, "best_of": 9},
]


def test_the_most_and_the_least_that_is_allowed_works_side_by_side(shared: LLM) -> None:
    common = {"temperature": 0.9, "max_tokens": 4, "ignore_eos": True}
    params = [SamplingParams(**{"seed": i} | common | asked) for i, asked in enumerate(EXTREME)]
    prompts = [[i, 5, 9, 222] for i in range(len(params))]
    together = shared.generate(prompts, params, use_tqdm=False)
    for prompt, own, output in zip(prompts, params, together, strict=True):
        (alone,) = shared.generate([prompt], own, use_tqdm=False)
        assert tokens(alone) == tokens(output)
        for completion in output.outputs:
            most = 60 if own.max_tokens is None or own.max_tokens > 60 else own.max_tokens
            assert len(completion.token_ids) == (1 if len(own.stop_token_ids) == 300 else most)
            assert all(0 <= token < 300 for token in completion.token_ids)


def tokens(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


# ---- models


@pytest.fixture
def broken(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be broken."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_weights_of_an_unsupported_model_are_never_fetched(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be hundreds of gigabytes."""
    fetched: list[list[str]] = []

    def snapshot_download(_: str, *, allow_patterns: list[str]) -> str:
        fetched.append(allow_patterns)
        return str(broken)

    def fetches_weights(patterns: list[str]) -> bool:
        return any(Path("model.safetensors").match(pattern) for pattern in patterns)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with open_llm(Path("someone/model")):
        assert [fetches_weights(patterns) for patterns in fetched] == [False, False, True]
    fetched.clear()
    edit_json(broken / "config.json", architectures=["GPT2LMHeadModel"])
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel"):
        open_llm(Path("someone/model"))
    assert [fetches_weights(patterns) for patterns in fetched] == [False, False]


@pytest.mark.parametrize("eos", [VOCAB_SIZE, [256, VOCAB_SIZE + 5], -1])
def test_an_end_of_text_outside_the_vocabulary_is_ignored(broken: Path, eos: object) -> None:
    """The tokenizer may know more tokens than the model can say; those cannot be banned either."""
    edit_json(broken / "generation_config.json", eos_token_id=eos)
    with open_llm(broken) as llm:
        params = SamplingParams(temperature=0, min_tokens=NEW, max_tokens=NEW)
        assert len(generate(llm, "hello", params)[0]) == NEW
        assert llm.engine.eos_token_ids == (256,)


def test_a_model_of_nan_is_a_named_error_for_its_requests(broken: Path) -> None:
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with open_llm(broken) as llm:
        with pytest.raises(StepFailed) as raised:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert isinstance(raised.value.__cause__, NotFiniteLogits)
        assert_idle(llm)
