"""The engine against itself: however a request is run, alone, batched, chunked, preempted, cached, it gets the same tokens.

Thirty-two prompts, half of them greedy and half sampled with seeds and filters, first run one at a time. Every other way of
running them must give the same tokens, over a KV pool full of NaN.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import replace
from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from tests.e2e.small_engine import assert_idle
from tests.support import fill_kv_with_nan

NUM_PROMPTS = 32
POOL_TOKENS = 8192
"""Room for all of them at once, and little to fill with NaN."""
Tokens = list[list[int]]


def engine(**options: Any) -> LLM:
    defaults = {"max_model_len": 512, "num_kv_blocks": POOL_TOKENS // options.get("block_size", 16)}
    llm = LLM("demo", dtype="float32", device="cpu", use_tqdm=False, **defaults | options)
    fill_kv_with_nan(llm)
    return llm


def run(llm: LLM, prompts: Tokens, params: list[SamplingParams]) -> Tokens:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_idle(llm)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def prompts(demo_llm: LLM) -> Tokens:
    """Real text of many lengths; every third prompt begins like the first, so that there is something to share."""
    ids = demo_llm.tokenizer.encode(inspect.getsource(textwrap))
    shared = ids[:70]
    lengths = [1 + (37 * i) % 150 for i in range(NUM_PROMPTS)]
    return [
        shared + ids[9 * i : 9 * i + 1 + length // 3] if i % 3 == 0 else ids[11 * i : 11 * i + length]
        for i, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def params() -> list[SamplingParams]:
    greedy = {"temperature": 0.0}
    sampled: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.05, "top_k": 50},
    ]
    return [
        SamplingParams(ignore_eos=True, max_tokens=24 + i % 17, seed=i, **(greedy if i % 2 else sampled[i // 2 % 4]))
        for i in range(NUM_PROMPTS)
    ]


@pytest.fixture(scope="module")
def alone(prompts: Tokens, params: list[SamplingParams]) -> Tokens:
    """What each prompt gets with the engine to itself, and nothing cached."""
    with engine(enable_prefix_caching=False) as llm:
        return [run(llm, [prompt], [own])[0] for prompt, own in zip(prompts, params, strict=True)]


def test_in_one_batch_twice_and_in_another_order(prompts: Tokens, params: list[SamplingParams], alone: Tokens) -> None:
    with engine() as llm:
        assert run(llm, prompts, params) == alone
        hits = llm.cache_stats.num_hit_tokens
        assert hits > 0, "prompts of one step share their beginnings"
        assert run(llm, prompts, params) == alone, "the second time, from the prefix cache"
        assert llm.cache_stats.num_hit_tokens > 2 * hits
        assert run(llm, prompts[::-1], params[::-1]) == alone[::-1]


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "scheduling_policy", "enable_prefix_caching"),
    [
        (5, "prefill_first", False),
        (5, "mixed", True),
        (64, "prefill_first", True),
        (64, "mixed", False),
        (64, "mixed", True),
        (333, "prefill_first", True),
        (333, "mixed", True),
    ],
)
def test_in_chunks_of_any_size(
    prompts: Tokens,
    params: list[SamplingParams],
    alone: Tokens,
    max_num_batched_tokens: int,
    scheduling_policy: str,
    enable_prefix_caching: bool,
) -> None:
    options = {"enable_prefix_caching": enable_prefix_caching, "scheduling_policy": scheduling_policy}
    with engine(max_num_batched_tokens=max_num_batched_tokens, **options) as llm:
        assert run(llm, prompts, params) == alone
        assert (llm.cache_stats.num_hit_tokens > 0) == enable_prefix_caching


@pytest.mark.parametrize("block_size", [1, 3, 64, 256])
def test_in_blocks_of_any_size(prompts: Tokens, params: list[SamplingParams], alone: Tokens, block_size: int) -> None:
    with engine(block_size=block_size, max_num_batched_tokens=200) as llm:
        assert run(llm, prompts, params) == alone


def test_with_every_operation_in_torch(prompts: Tokens, params: list[SamplingParams], alone: Tokens) -> None:
    with engine(kernels="torch", max_num_batched_tokens=200) as llm:
        assert run(llm, prompts, params) == alone


@pytest.mark.parametrize(
    ("block_size", "num_kv_blocks", "scheduling_policy", "enable_prefix_caching"),
    [
        (16, 8, "prefill_first", True),
        (16, 8, "mixed", False),
        (3, 43, "prefill_first", False),
        (3, 43, "mixed", True),
        (1, 128, "prefill_first", True),
        (1, 128, "mixed", False),
    ],
)
def test_preempted_many_times(
    prompts: Tokens,
    params: list[SamplingParams],
    alone: Tokens,
    block_size: int,
    num_kv_blocks: int,
    scheduling_policy: str,
    enable_prefix_caching: bool,
) -> None:
    """The pool holds one of the longest: most of them give way to another once."""
    few = [i for i, prompt in enumerate(prompts) if len(prompt) <= 82]
    options = {"block_size": block_size, "num_kv_blocks": num_kv_blocks, "enable_prefix_caching": enable_prefix_caching}
    with engine(max_model_len=128, max_num_batched_tokens=48, scheduling_policy=scheduling_policy, **options) as llm:
        assert run(llm, [prompts[i] for i in few], [params[i] for i in few]) == [alone[i] for i in few]
        assert llm.engine.scheduler.num_preemptions > len(few) // 2


def test_other_seeds_change_what_is_sampled_and_nothing_else(
    prompts: Tokens, params: list[SamplingParams], alone: Tokens
) -> None:
    """The inverse: without it, all of the above could pass by ignoring the params."""
    with engine() as llm:
        others = run(llm, prompts, [replace(own, seed=1000 + i) for i, own in enumerate(params)])
    changed = [other != base for other, base in zip(others, alone, strict=True)]
    assert not any(changed[i] for i in range(NUM_PROMPTS) if params[i].temperature == 0)
    # A few prompts leave the model no choice, whatever the seed.
    assert sum(changed) >= 0.8 * sum(own.temperature > 0 for own in params)


def test_completions_of_one_request_differ_and_repeat(prompts: Tokens) -> None:
    own = SamplingParams(temperature=1.0, n=4, seed=3, max_tokens=20, ignore_eos=True)
    with engine() as llm:
        first = [c.token_ids for c in llm.generate(prompts[5], own, use_tqdm=False)[0].outputs]
        assert len({tuple(tokens) for tokens in first}) == 4
    with engine(max_num_seqs=1, block_size=3) as llm:
        assert [c.token_ids for c in llm.generate(prompts[5], own, use_tqdm=False)[0].outputs] == first
