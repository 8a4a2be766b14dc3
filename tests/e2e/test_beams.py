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


def open_llm(model: Path | str = "demo", **options: Any) -> LLM:
    defaults: dict[str, Any] = {"max_model_len": 256, "num_kv_blocks": 300}
    llm = LLM(str(model), dtype="float32", device="cpu", use_tqdm=False, **defaults | options)
    fill_kv_with_nan(llm)
    return llm


def token_ids(output: RequestOutput) -> Tokens:
    return [completion.token_ids for completion in output.outputs]


def reference_logprob(model: Any, prompt: list[int], new: list[int]) -> float:
    """Of a continuation, by transformers."""
    logprobs = reference_logits(model, prompt + new).log_softmax(-1)[len(prompt) - 1 : -1]
    return float(logprobs.gather(1, torch.tensor(new)[:, None]).sum())


@pytest.fixture(scope="module")
def text(demo_llm: LLM) -> list[int]:
    """Real text."""
    return demo_llm.tokenizer.encode(inspect.getsource(textwrap))


class Beams:
    """Beam search by transformers; what it found once it knows."""

    def __init__(self, newline: int):
        self.model = reference_model(DEMO)
        self.eos = [0, newline]  # the bundled model seldom ends a text, but often a line
        self.known: dict[Any, Tokens] = {}

    @torch.inference_mode()
    def __call__(self, prompt: list[int], params: BeamSearchParams) -> Tokens:
        key = tuple(prompt), params
        if key not in self.known:
            eos = None if params.ignore_eos else self.eos
            self.model.generation_config.eos_token_id = eos
            rows = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                num_beams=params.beam_width,
                num_return_sequences=params.beam_width,
                max_new_tokens=params.max_tokens,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                do_sample=False,
                pad_token_id=0,
            )
            new = [row[len(prompt) :] for row in rows.tolist()]
            ends = [next((i for i, token in enumerate(row) if token in (eos or ())), len(row)) for row in new]
            self.known[key] = [row[: end + 1] for row, end in zip(new, ends, strict=True)]
        return self.known[key]


@pytest.fixture(scope="module")
def transformers_beams(demo_llm: LLM) -> Beams:
    (newline,) = demo_llm.tokenizer.encode("\n")
    return Beams(newline)


@pytest.fixture(scope="module")
def beam_prompts(text: list[int]) -> Tokens:
    return [text[700:701], text[500:555], text[100:117]]


@pytest.fixture(scope="module")
def line_model(transformers_beams: Beams, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, for which the end of a line ends the text."""
    folder = tmp_path_factory.mktemp("lines")
    for file in DEMO.glob("*"):
        if file.is_file() and file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": transformers_beams.eos}))
    return folder


@pytest.fixture(scope="module")
def beam_llm(line_model: Path) -> Iterator[LLM]:
    with open_llm(line_model) as llm:
        yield llm


@pytest.mark.parametrize(
    "asked",
    [
        {"beam_width": 2, "length_penalty": 1.0, "early_stopping": False},
        {"beam_width": 3, "length_penalty": 0.0, "early_stopping": True},
        {"beam_width": 4, "length_penalty": -1.0, "early_stopping": "never"},
        {"beam_width": 4, "length_penalty": 2.0, "early_stopping": "never"},
        {"beam_width": 3, "ignore_eos": True},
    ],
)
def test_beams_are_those_of_transformers(
    beam_llm: LLM, transformers_beams: Beams, beam_prompts: Tokens, asked: dict[str, Any]
) -> None:
    params = BeamSearchParams(max_tokens=15, **asked)
    for prompt in beam_prompts:
        (output,) = beam_llm.beam_search(prompt, params, use_tqdm=False)
        assert token_ids(output) == transformers_beams(prompt, params)
    assert_idle(beam_llm)


def test_what_a_beam_says_of_itself(beam_llm: LLM, transformers_beams: Beams, beam_prompts: Tokens) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=15, early_stopping=True)
    reasons = set()
    for output in beam_llm.beam_search(beam_prompts, params, use_tqdm=False):
        for i, beam in enumerate(output.outputs):
            stopped = beam.token_ids[-1] in transformers_beams.eos
            assert beam.index == i
            assert beam.finish_reason == ("stop" if stopped else "length")
            assert beam.text == beam_llm.tokenizer.decode(beam.token_ids[: -1 if stopped else None])
            expected = reference_logprob(transformers_beams.model, output.prompt_token_ids, beam.token_ids)
            assert beam.cumulative_logprob == pytest.approx(expected, abs=1e-3)
            reasons.add(beam.finish_reason)
        scores = [(beam.cumulative_logprob or 0.0) / len(beam.token_ids) for beam in output.outputs]
        assert scores == sorted(scores, reverse=True)
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 20, "enable_prefix_caching": False, "max_num_batched_tokens": 20},
        {"num_kv_blocks": 20, "preemption_mode": "swap", "kv_host_memory": 1 << 20},
        {"num_kv_blocks": 80, "block_size": 4, "max_num_seqs": 5},
    ],
)
def test_beams_of_many_prompts_in_a_tiny_pool(
    line_model: Path, transformers_beams: Beams, beam_prompts: Tokens, text: list[int], options: dict[str, Any]
) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=15, length_penalty=2.0, early_stopping="never")
    with open_llm(line_model, max_model_len=100, **options) as llm:
        for output in llm.beam_search([*beam_prompts, text[800:855]], params, use_tqdm=False):
            assert token_ids(output) == transformers_beams(output.prompt_token_ids, params)
        assert_idle(llm)
