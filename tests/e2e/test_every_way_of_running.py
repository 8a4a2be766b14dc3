"""However requests are run, they get the tokens that each gets alone: with every sampling parameter, under every policy.

Requests are drawn once, and run one by one in an engine that computes everything anew. Then engines are drawn: policy, sizes of
steps, blocks and pool, depth, kernels, recorded steps, tiers. Each runs some of the requests, and then the same once more.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM, RequestOutput, SamplingParams
from nanoengine.kernels.options import KernelOptions
from nanoengine.models.options import ModelOptions
from nanoengine.sampling.token_logprobs import TokenLogprobs
from tests.e2e.late import late_device
from tests.e2e.small_engine import assert_idle, finish, open_llm
from tests.support import fill_kv_with_nan, reference_logits, reference_model

NUM_REQUESTS = 32
MAX_LEN = 60
SHARED = [(3 * i + 1) % 200 for i in range(21)]

Asked = tuple[list[int], SamplingParams]
Told = list[tuple[list[int], Any, Any]]
"""Of each completion: its tokens, its log probabilities and those of the prompt, both without their values."""

WISHES: dict[str, list[dict[str, Any]]] = {
    "temperature": [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.3}],
    "filters": [{}, {}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05, "top_k": 40}],
    "penalties": [
        {},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"frequency_penalty": -1.0, "repetition_penalty": 0.8},
    ],
    "bias": [{}, {}, {"logit_bias": {7: 4.0, 30: -4.0, 90: 2.5}}, {"allowed_token_ids": range(0, 300, 3)}],
    "bad words": [{}, {}, {"bad_words": ["a", "b", "zz"]}, {"bad_words": [chr(i) for i in range(48, 112)]}],
    "end": [{"ignore_eos": True}, {"stop_token_ids": list(range(0, 300, 9)), "min_tokens": 3}],
    "logprobs": [{}, {"logprobs": 0}, {"logprobs": 3}],
    "prompt logprobs": [{}, {}, {}, {"prompt_logprobs": 2}],
    "completions": [{}, {}, {"n": 2}, {"n": 3}, {"n": 1, "best_of": 2}],
}


def draw_request(i: int) -> Asked:
    rng = random.Random(i)
    prompt = SHARED[: rng.choice([0, 0, 15, 16, 21])] + [rng.randrange(256) for _ in range(rng.randint(1, 25))]
    wishes: dict[str, Any] = {"seed": i, "max_tokens": rng.randint(3, 10)}
    for choices in WISHES.values():
        wishes |= rng.choice(choices)
    return prompt, SamplingParams(**wishes)


REQUESTS = [draw_request(i) for i in range(NUM_REQUESTS)]


def draw_engine(i: int) -> dict[str, Any]:
    """Every second engine has a small pool; what matters most is dealt out evenly."""
    rng = random.Random(i)
    block_size = rng.choice([4, 16])
    tiers: list[dict[str, Any]] = [
        {},
        {"preemption_mode": "swap", "kv_host_memory": 1 << 20},
        {"preemption_mode": "swap"},
        {},
    ]
    return {
        "scheduling_policy": ("prefill_first", "mixed")[i % 2],
        "async_scheduling": i % 3 > 0,
        "kernels": ("torch", "auto")[i // 2 % 2],
        "kv_cache_dtype": ("auto", "int8")[(i // 3 + i) % 2],
        "max_num_batched_tokens": rng.choice([3, 7, 16, 64, 8192]),
        "long_prefill_token_threshold": rng.choice([None, None, 5]),
        "max_num_seqs": rng.choice([3, 6, 256]),
        "block_size": block_size,
        "num_kv_blocks": (64 if i // 2 % 2 else 800) // block_size,
        **(tiers[i // 4 % 4] if i % 5 else {"enable_prefix_caching": False}),
    }


def told(output: RequestOutput) -> Told:
    prompt = keys(output.prompt_logprobs)
    return [(completion.token_ids, keys(completion.logprobs), prompt) for completion in output.outputs]


def keys(entries: Any) -> Any:
    """Which tokens have log probabilities, and of what rank."""
    if entries is None:
        return None
    return [entry and sorted((found.rank, token) for token, found in entry.items()) for entry in entries]


def run(llm: LLM, requests: list[Asked], seed: int | None = None) -> list[Told]:
    """Run requests, with priorities and clients drawn from a seed, or without any.

    Of an engine with K/V or activations in 8 bits, the tokens alone: what is rounded so coarsely may change ranks of unlikely
    ones, where sums are added in another order.
    """
    if seed is None:
        outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
    else:
        outputs = run_in_places(llm, requests, random.Random(seed))
    assert_idle(llm)
    if llm.config.of(KernelOptions).kv_cache_dtype == "int8" or llm.config.of(ModelOptions).quantization is not None:
        return [[(tokens, None, None) for tokens, _, _ in told(output)] for output in outputs]
    return [told(output) for output in outputs]


def run_in_places(llm: LLM, requests: list[Asked], rng: random.Random) -> list[RequestOutput]:
    """Some come before others, and not all are sent by the same client."""
    made = [
        llm.engine.make_request(*asked, priority=rng.choice([0, 0, -1, 5]), client=rng.choice("aab"))
        for asked in requests
    ]
    for request in made:
        llm.engine.submit(request)
    finish(llm)
    assert not any(request.error for request in made)
    return [request.output() for request in made]


BARE: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False, "async_scheduling": False}


@pytest.fixture(scope="module")
def bare(tiny: Path) -> Iterator[LLM]:
    """One request at a time, one step at a time, nothing shared."""
    with open_llm(tiny, max_model_len=MAX_LEN, num_kv_blocks=50, **BARE) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(tiny: Path, bare: LLM) -> dict[str, list[Told]]:
    """By `kv_cache_dtype`."""
    found = {"auto": [run(bare, [request])[0] for request in REQUESTS]}
    with open_llm(tiny, max_model_len=MAX_LEN, num_kv_blocks=50, kv_cache_dtype="int8", **BARE) as llm:
        return found | {"int8": [run(llm, [request])[0] for request in REQUESTS]}


@pytest.mark.parametrize("number", range(20))
def test_tokens_are_those_that_each_gets_alone(tiny: Path, alone: dict[str, list[Told]], number: int) -> None:
    options = draw_engine(number)
    chosen = random.Random(number).sample(range(NUM_REQUESTS), 12)
    requests, right = [REQUESTS[i] for i in chosen], [alone[options["kv_cache_dtype"]][i] for i in chosen]
    with ExitStack() as stack:
        device = stack.enter_context(late_device(can_record=number % 4 > 1, seed=number)) if number % 3 == 2 else None
        llm = stack.enter_context(open_llm(tiny, max_model_len=MAX_LEN, **options))
        fill_kv_with_nan(llm)
        assert run(llm, requests) == right
        assert run(llm, requests[::-1], seed=number) == right[::-1], "with what the first time has left in the cache"
        metrics = llm.metrics
    if options["num_kv_blocks"] * options["block_size"] == 64 and llm.engine.scheduler.max_num_seqs > 3:
        assert metrics.num_preemptions > 0
    if options.get("preemption_mode") == "swap":
        assert bool(metrics.offload.num_saved_blocks) == bool(metrics.cache.num_evicted_blocks)
    assert (metrics.cache.num_hit_tokens > 0) == options.get("enable_prefix_caching", True)
    assert device is None or device.num_overlapping > 0


@pytest.mark.parametrize(
    "wish", [wish for wish in WISHES if wish not in ("logprobs", "prompt logprobs", "completions")]
)
def test_every_wish_changes_some_tokens(bare: LLM, alone: dict[str, list[Told]], wish: str) -> None:
    """The inverse: without it, all of the above could pass by ignoring the params."""
    plain = SamplingParams()
    unlike = [
        (i, replace(params, **{field: getattr(plain, field) for choice in WISHES[wish] for field in choice}))
        for i, (_, params) in enumerate(REQUESTS)
    ]
    changed = [i for i, params in unlike if params != REQUESTS[i][1]]
    assert any(run(bare, [(REQUESTS[i][0], dict(unlike)[i])])[0] != alone["auto"][i] for i in changed[:8])


def test_8_bits_change_what_is_said_of_some_tokens(alone: dict[str, list[Told]]) -> None:
    """Or the engines drawn with them could pass without them."""
    tokens = {dtype: [[own for own, _, _ in told] for told in alone[dtype]] for dtype in alone}
    assert tokens["int8"] != tokens["auto"]


# ---- what is counted survives


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
@pytest.mark.parametrize("options", [{}, {"preemption_mode": "swap", "kv_host_memory": 1 << 20}], ids=["", "swap"])
def test_penalties_survive_preemption(tiny: Path, bare: LLM, options: dict[str, Any], policy: str) -> None:
    """What counts are the tokens of the output: those that are prefilled again are no part of the prompt."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, presence_penalty=1.0, frequency_penalty=0.5),
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, bad_words=["a", "qz", "b"]),
    ]
    requests = [([50 + i] * 5, params[i % 3]) for i in range(6)]
    right = [run(bare, [request])[0] for request in requests]
    without = [run(bare, [(prompt, SamplingParams(temperature=0.0, max_tokens=20))])[0] for prompt, _ in requests]
    assert all(penalized != other for penalized, other in zip(right[:2], without[:2], strict=True))
    with open_llm(
        tiny, max_model_len=MAX_LEN, num_kv_blocks=15, block_size=4, scheduling_policy=policy, **options
    ) as llm:
        fill_kv_with_nan(llm)
        assert run(llm, requests) == right
        assert llm.engine.scheduler.num_preemptions > 3


# ---- log probabilities of prompts


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[dict[int, tuple[float, int]] | None]]:
    """Of each prompt below, by transformers: the log probability and rank of its tokens and of the two likeliest."""
    model = reference_model(tiny)
    found = []
    for prompt in PROMPTS:
        rows = reference_logits(model, prompt).log_softmax(-1)
        entries: list[dict[int, tuple[float, int]] | None] = [None]
        for row, token in zip(rows, prompt[1:], strict=False):
            tokens = dict.fromkeys([token, *row.topk(2).indices.tolist()])
            entries.append({i: (float(row[i]), int((row > row[i]).sum()) + 1) for i in tokens})
        found.append(entries)
    return found


PROMPTS = [SHARED * 2 + [9, 8], SHARED[:20], [5], [7, 7], SHARED + [(11 * i) % 256 for i in range(33)]]


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
@pytest.mark.parametrize("chunk", [8192, 16, 5])
@pytest.mark.parametrize("overlap", [False, True])
def test_log_probabilities_of_prompts_are_those_of_transformers_cached_or_not(
    tiny: Path, expected: list[Any], policy: str, chunk: int, overlap: bool
) -> None:
    asking = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=2, n=2)
    plain = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    options = {"scheduling_policy": policy, "max_num_batched_tokens": chunk, "async_scheduling": overlap}
    with open_llm(tiny, num_kv_blocks=60, block_size=4, **options) as llm:
        fill_kv_with_nan(llm)
        llm.generate([PROMPTS[0]], plain, use_tqdm=False)  # now a prefix of some is cached
        for _ in range(2):
            busy = [([i] * 9, plain) for i in range(3)]
            requests = [*busy, *((prompt, asking) for prompt in PROMPTS)]
            outputs = llm.generate(*map(list, zip(*requests, strict=True)), use_tqdm=False)
            assert_idle(llm)
            for output in outputs[:3]:
                assert output.prompt_logprobs is None
            for output, entries in zip(outputs[3:], expected, strict=True):
                assert output.num_cached_tokens == 0, "all of it is computed"
                assert output.prompt_logprobs is not None
                assert_close(output.prompt_logprobs, entries)
        (again,) = llm.generate([PROMPTS[4]], plain, use_tqdm=False)
        assert again.num_cached_tokens == 52, "what was computed for them serves others"


def test_log_probabilities_of_prompts_survive_preemption(tiny: Path, expected: list[Any]) -> None:
    """Others that decode take its blocks away while the prompt is half computed."""
    plain = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    asking = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, prompt_logprobs=2)
    options = {"max_num_batched_tokens": 6, "scheduling_policy": "mixed", "max_model_len": 40, "num_kv_blocks": 10}
    with open_llm(tiny, block_size=4, **options) as llm:
        fill_kv_with_nan(llm)
        prompts = [[3, 4], [5, 6], [7, 8], PROMPTS[1]]
        output = llm.generate(prompts, [plain, plain, plain, asking], use_tqdm=False)[-1]
        assert_idle(llm)
        assert output.metrics.num_preemptions > 0
        assert output.prompt_logprobs is not None
        assert_close(output.prompt_logprobs, expected[1])


def assert_close(found: list[TokenLogprobs | None], expected: list[dict[int, tuple[float, int]] | None]) -> None:
    assert found[0] is None
    assert expected[0] is None
    for entry, right in zip(found[1:], expected[1:], strict=True):
        assert entry is not None
        assert right is not None
        assert entry.keys() == right.keys()
        for token, (logprob, rank) in right.items():
            assert entry[token].rank == rank
            assert entry[token].logprob == pytest.approx(logprob, abs=1e-4)
