"""Beams against transformers, over a KV pool full of NaN, so that a block which is shared or taken back wrongly shows."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM, BeamSearchParams, RequestOutput
from nanoengine.models.names import DEMO
from tests.e2e.small_engine import assert_idle
from tests.support import fill_kv_with_nan, reference_logits, reference_model

Tokens = list[list[int]]


def token_ids(output: RequestOutput) -> Tokens:
    return [completion.token_ids for completion in output.outputs]


def reference_logprob(model: Any, prompt: list[int], new: list[int]) -> float:
    """Of a continuation, by transformers."""
    logprobs = reference_logits(model, prompt + new).log_softmax(-1)[len(prompt) - 1 : -1]
    return float(logprobs.gather(1, torch.tensor(new)[:, None]).sum())


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model(DEMO)


@pytest.fixture(scope="module")
def ends(demo_llm: LLM) -> list[int]:
    """The bundled model seldom ends a text, but often a line."""
    return [0, *demo_llm.tokenizer.encode("\n")]


@torch.inference_mode()
def beams_of_transformers(model: Any, eos: list[int] | None, prompt: list[int], params: BeamSearchParams) -> Tokens:
    model.generation_config.eos_token_id = eos
    rows = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        do_sample=False,
        pad_token_id=0,
    )
    new = [row[len(prompt) :] for row in rows.tolist()]
    ends = [next((i for i, token in enumerate(row) if token in (eos or ())), len(row)) for row in new]
    return [row[: end + 1] for row, end in zip(new, ends, strict=True)]


@pytest.fixture(scope="module")
def beam_prompts(demo_llm: LLM) -> Tokens:
    """Of real text."""
    text = demo_llm.tokenizer.encode(inspect.getsource(textwrap))
    return [text[700:701], text[500:555], text[100:117]]


@pytest.fixture(scope="module")
def line_model(ends: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, for which the end of a line ends the text."""
    folder = tmp_path_factory.mktemp("lines")
    for file in DEMO.glob("*"):
        if file.is_file() and file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.fixture(scope="module")
def beam_llm(line_model: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"max_model_len": 256, "num_kv_blocks": 300, "dtype": "float32", "device": "cpu"}
    with LLM(str(line_model), use_tqdm=False, **options) as llm:
        fill_kv_with_nan(llm)
        yield llm


@pytest.mark.parametrize(
    "asked",
    [
        {"beam_width": 2, "length_penalty": 1.0},
        {"beam_width": 3, "length_penalty": 0.0},
        {"beam_width": 4, "length_penalty": -1.0},
        {"beam_width": 4, "length_penalty": 2.0},
        {"beam_width": 3, "ignore_eos": True},
    ],
)
def test_beams_are_those_of_transformers(
    beam_llm: LLM, reference: Any, ends: list[int], beam_prompts: Tokens, asked: dict[str, Any]
) -> None:
    params = BeamSearchParams(max_tokens=15, **asked)
    for prompt in beam_prompts:
        (output,) = beam_llm.beam_search(prompt, params, use_tqdm=False)
        eos = None if params.ignore_eos else ends
        assert token_ids(output) == beams_of_transformers(reference, eos, prompt, params)
    assert_idle(beam_llm)


def test_what_a_beam_says_of_itself(beam_llm: LLM, reference: Any, ends: list[int], beam_prompts: Tokens) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=15)
    reasons = set()
    for output in beam_llm.beam_search(beam_prompts, params, use_tqdm=False):
        for i, beam in enumerate(output.outputs):
            stopped = beam.token_ids[-1] in ends
            assert beam.index == i
            assert beam.finish_reason == ("stop" if stopped else "length")
            assert beam.text == beam_llm.tokenizer.decode(beam.token_ids[: -1 if stopped else None])
            expected = reference_logprob(reference, output.prompt_token_ids, beam.token_ids)
            assert beam.cumulative_logprob == pytest.approx(expected, abs=1e-3)
            reasons.add(beam.finish_reason)
        scores = [(beam.cumulative_logprob or 0.0) / len(beam.token_ids) for beam in output.outputs]
        assert scores == sorted(scores, reverse=True)
    assert reasons == {"stop", "length"}
