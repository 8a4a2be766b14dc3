"""Several continuations of one prompt: beams against transformers, completions against the same ones alone.

The KV pool is full of NaN, so that a block which is shared or taken back wrongly shows.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM, BeamSearchParams, RequestOutput, SamplingParams
from nanoengine.errors import InvalidPrompt, InvalidSamplingParams
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


# ---- beam search


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


WIDTHS_PENALTIES_STOPS = [
    (2, 1.0, False),
    (3, 0.0, True),
    (4, -1.0, "never"),
    (4, 2.0, "never"),
    (5, 1.0, True),
    (3, 2.0, False),
]


@pytest.mark.parametrize(("width", "length_penalty", "early_stopping"), WIDTHS_PENALTIES_STOPS)
def test_beams_are_those_of_transformers(
    beam_llm: LLM,
    transformers_beams: Beams,
    beam_prompts: Tokens,
    width: int,
    length_penalty: float,
    early_stopping: bool | str,
) -> None:
    params = BeamSearchParams(
        beam_width=width, max_tokens=15, length_penalty=length_penalty, early_stopping=early_stopping
    )
    for prompt in beam_prompts:
        (output,) = beam_llm.beam_search(prompt, params, use_tqdm=False)
        assert token_ids(output) == transformers_beams(prompt, params)
    assert_idle(beam_llm)


def test_beams_without_ends_of_text_are_those_of_transformers(
    beam_llm: LLM, transformers_beams: Beams, beam_prompts: Tokens
) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=15, ignore_eos=True)
    for output in beam_llm.beam_search(beam_prompts, params, use_tqdm=False):
        assert token_ids(output) == transformers_beams(output.prompt_token_ids, params)
        assert [completion.finish_reason for completion in output.outputs] == ["length"] * 3


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
        {"num_kv_blocks": 20},
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


def test_a_bad_prompt_among_those_to_search_runs_nothing(beam_llm: LLM, beam_prompts: Tokens) -> None:
    before = beam_llm.metrics.steps.prefill_tokens
    with pytest.raises(InvalidPrompt):
        beam_llm.beam_search([beam_prompts[0], []], BeamSearchParams(beam_width=2), use_tqdm=False)
    with pytest.raises(InvalidSamplingParams, match="beam_width"):
        beam_llm.beam_search(beam_prompts, BeamSearchParams(beam_width=49), use_tqdm=False)
    assert_idle(beam_llm)
    assert beam_llm.metrics.steps.prefill_tokens == before


# ---- several completions

PARAMS = [
    SamplingParams(n=4, temperature=0.9, seed=11, max_tokens=22, ignore_eos=True),
    SamplingParams(n=3, temperature=0.0, max_tokens=15, ignore_eos=True),
    SamplingParams(n=1, temperature=1.1, top_k=30, seed=5, max_tokens=25, ignore_eos=True),
    SamplingParams(n=5, temperature=1.0, top_p=0.9, seed=11, max_tokens=19, ignore_eos=True),
    SamplingParams(n=2, best_of=4, temperature=0.8, seed=3, max_tokens=20, ignore_eos=True),
    SamplingParams(n=2, temperature=0.7, seed=9, max_tokens=24, ignore_eos=True, logprobs=2),
]
LENGTHS = [70, 33, 48, 16, 5, 100]


@pytest.fixture(scope="module")
def prompts_of_several(text: list[int]) -> Tokens:
    return [text[60 * i : 60 * i + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def alone(prompts_of_several: Tokens) -> list[Tokens]:
    """What every completion gets with the engine to itself, and nothing cached or shared."""
    with open_llm(max_num_seqs=1, enable_prefix_caching=False) as llm:
        outputs = llm.generate(prompts_of_several, PARAMS, use_tqdm=False)
        return [token_ids(output) for output in outputs]


def test_a_completion_is_that_of_its_seed_and_index(prompts_of_several: Tokens, alone: list[Tokens]) -> None:
    assert len({tuple(tokens) for tokens in alone[0]}) == 4, "sampled completions differ"
    assert alone[1][0] == alone[1][1] == alone[1][2], "greedy ones do not"
    with open_llm() as llm:
        fewer = SamplingParams(n=2, temperature=0.9, seed=11, max_tokens=22, ignore_eos=True)
        assert token_ids(llm.generate(prompts_of_several[0], fewer, use_tqdm=False)[0]) == alone[0][:2]


@pytest.mark.parametrize(
    ("enable_prefix_caching", "options"),
    [
        (True, {}),
        (False, {"max_num_batched_tokens": 21}),
        (True, {"num_kv_blocks": 13}),
        (False, {"num_kv_blocks": 13}),
        (True, {"num_kv_blocks": 13, "max_num_batched_tokens": 33, "max_num_seqs": 4}),
        (True, {"num_kv_blocks": 70, "block_size": 3}),
    ],
)
def test_completions_side_by_side_are_those_alone(
    prompts_of_several: Tokens, alone: list[Tokens], options: dict[str, Any], enable_prefix_caching: bool
) -> None:
    with open_llm(max_model_len=200, enable_prefix_caching=enable_prefix_caching, **options) as llm:
        for order in (1, -1):
            outputs = llm.generate(prompts_of_several[::order], PARAMS[::order], use_tqdm=False)
            assert [token_ids(output) for output in outputs] == alone[::order]
            assert_idle(llm)
        scheduler = llm.engine.scheduler
        assert scheduler.num_preemptions > 0 or "num_kv_blocks" not in options


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("chunk", [8192, 30])
@pytest.mark.parametrize(("length", "shared"), [(70, 64), (48, 32)])
def test_full_blocks_of_the_prompt_are_computed_once_for_all_completions(
    text: list[int], enable_prefix_caching: bool, chunk: int, length: int, shared: int
) -> None:
    """What is behind them, at least a token, each computes for itself."""
    with open_llm(enable_prefix_caching=enable_prefix_caching, max_num_batched_tokens=chunk) as llm:
        llm.generate(text[:length], PARAMS[0], use_tqdm=False)
        assert llm.metrics.steps.prefill_tokens == length + 3 * (length - shared)
        assert llm.metrics.steps.decode_tokens == 4 * 21


def test_best_of_reports_the_likeliest_first(prompts_of_several: Tokens, transformers_beams: Beams) -> None:
    every = SamplingParams(n=6, temperature=1.0, seed=4, max_tokens=12, ignore_eos=True, logprobs=0)
    best = SamplingParams(n=2, best_of=6, temperature=1.0, seed=4, max_tokens=12, ignore_eos=True)
    with open_llm() as llm:
        (all_six,) = llm.generate(prompts_of_several[3], every, use_tqdm=False)
        (output,) = llm.generate(prompts_of_several[3], best, use_tqdm=False)
    ranked = sorted(all_six.outputs, key=lambda completion: -(completion.cumulative_logprob or 0.0))
    assert token_ids(output) == [completion.token_ids for completion in ranked[:2]]
    assert [completion.index for completion in output.outputs] == [0, 1]
    for completion, same in zip(output.outputs, ranked, strict=False):
        assert completion.logprobs is None, "nobody asked for them"
        assert completion.text == same.text
        assert completion.cumulative_logprob == pytest.approx(same.cumulative_logprob, abs=1e-3)
        expected = reference_logprob(transformers_beams.model, prompts_of_several[3], completion.token_ids)
        assert completion.cumulative_logprob == pytest.approx(expected, abs=1e-3)


def test_best_of_n_reports_all_of_them_in_order(prompts_of_several: Tokens) -> None:
    params = SamplingParams(n=4, best_of=4, temperature=1.0, seed=4, max_tokens=12, logprobs=1)
    with open_llm() as llm:
        (output,) = llm.generate(prompts_of_several[3], params, use_tqdm=False)
    sums = [completion.cumulative_logprob for completion in output.outputs]
    assert len(sums) == 4
    assert sums == sorted(sums, key=lambda total: -(total or 0.0))
    assert all(completion.logprobs for completion in output.outputs)


def test_a_stream_has_one_completion_and_cannot_choose_the_best_of_several(demo_llm: LLM) -> None:
    with pytest.raises(InvalidSamplingParams, match="the params ask for 3 completions"):
        demo_llm.stream("x", SamplingParams(best_of=3))
    assert "".join(demo_llm.stream("x", SamplingParams(best_of=1, max_tokens=3, seed=1)))
    assert_idle(demo_llm)
