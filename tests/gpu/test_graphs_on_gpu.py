"""Recorded decode steps on an NVIDIA GPU: in every size they do what unrecorded ones do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.modes import FASTEST, MODES, Mode, running_in
from nanoengine import LLM, SamplingParams
from nanoengine.engine.kv.block_pool import NULL_BLOCK
from nanoengine.engine.request import Request
from nanoengine.errors import InvalidPrompt
from nanoengine.runner.graphs import bucket_sizes
from tests.gpu.engines import MAX_LEN, VOCAB_SIZE, Tokens, assert_idle, generate, needs_gpu, on_cpu, open_llm
from tests.support import fill_kv_with_nan, model_runner

pytestmark = needs_gpu

MOST = 21
EAGER = Mode(overlap=False, graphs=False)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with open_llm(checkpoint, max_num_seqs=MOST, kernels="triton", attention_backend="triton") as llm:
        yield llm


@pytest.fixture
def sizes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the recorded steps that are repeated."""
    graphs = model_runner(llm).graphs
    assert graphs is not None
    repeat, seen = graphs.repeat, []

    def watched(size: int) -> torch.Tensor:
        seen.append(size)
        return repeat(size)

    monkeypatch.setattr(graphs, "repeat", watched)
    return seen


def serve_one_by_one(llm: LLM) -> Tokens:
    """A request more with every step, up to as many as can run; then they end one by one."""
    llm.reset_prefix_cache()
    fill_kv_with_nan(llm)
    running: list[Request] = []
    for i in range(MOST):
        params = SamplingParams(temperature=0.6 * (i % 2), seed=i, ignore_eos=True, max_tokens=2 * MOST + i % 5 * 2)
        running.append(llm.engine.add_request([(11 * i + j) % VOCAB_SIZE for j in range(1 + 3 * i)], params))
        llm.engine.step()
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert_idle(llm)
    return [[completion.token_ids for completion in request.output().outputs] for request in running]


def test_every_size_repeats_what_an_unrecorded_step_does(llm: LLM, sizes: list[int]) -> None:
    with running_in(llm, EAGER):
        eager = serve_one_by_one(llm)
    assert sizes == []
    for mode in MODES[:2]:
        with running_in(llm, mode):
            assert serve_one_by_one(llm) == eager, mode
        assert set(sizes) == set(bucket_sizes(MOST)), "each was there, on the way up or down"
        sizes.clear()


def test_padding_is_written_nowhere(llm: LLM, sizes: list[int]) -> None:
    fill_kv_with_nan(llm)
    llm.reset_prefix_cache()
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=9)] * 3
    with running_in(llm, FASTEST):
        generate(llm, [[1, 2, 3], [4], [5, 6]], params)
    assert set(sizes) == {4}
    kv_cache = model_runner(llm).kv_cache
    assert kv_cache is not None
    assert all(cache[NULL_BLOCK].isnan().all() for layer in kv_cache.layers for cache in layer)


def test_sequences_reach_the_longest_length_there_is(llm: LLM, checkpoint: Path, sizes: list[int]) -> None:
    lengths = [MAX_LEN - 1, MAX_LEN - 2, MAX_LEN - 20, 1, 30]
    prompts = [[(11 * i + 3 * j) % VOCAB_SIZE for j in range(length)] for i, length in enumerate(lengths)]
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)] * len(prompts)
    expected = on_cpu(checkpoint, prompts, params)
    assert [len(tokens) for (tokens,) in expected] == [MAX_LEN - length for length in lengths]
    for mode in MODES:
        fill_kv_with_nan(llm)
        llm.reset_prefix_cache()
        with running_in(llm, mode):
            assert generate(llm, prompts, params) == expected, mode
    assert sizes
    with pytest.raises(InvalidPrompt, match="max_model_len"):
        llm.generate([[1] * MAX_LEN], params[0], use_tqdm=False)


def test_recorded_and_unrecorded_steps_take_turns(llm: LLM, sizes: list[int]) -> None:
    """Log probabilities are not recorded: while a request asks for some, no step is."""
    plain = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=25)
    curious = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4, logprobs=2)
    prompts, params = [[1, 2], [3], [4, 5, 6]], [plain, curious, plain]
    with running_in(llm, EAGER):
        expected = generate(llm, prompts, params)
    with running_in(llm, FASTEST):
        assert generate(llm, prompts, params) == expected
    assert 0 < len(sizes) < 25
