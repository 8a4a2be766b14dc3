"""Speculation beside the other capabilities: whatever a request asks for, it gets the same with drafts, to the bit.

Penalties, bad words, bans and log probabilities depend on the tokens before a sample, and in a run some of these are drafts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from nanoengine.core.config import EngineConfig
from nanoengine.core.llm import LLM
from nanoengine.core.sequence import Request
from nanoengine.core.startup import Startup
from nanoengine.speculation.capability import SpeculativeDecoding
from nanoengine.speculation.speculation import Speculation
from tests.speculation.scripted import HARM, Scripted
from tests.speculation.test_every_way import Free, knowing
from tests.support import tiny_checkpoint

PARTS = ("models:Models", "kernels:NativeAndTriton", "kv_groups:KVGroups", "sampling:Sampling", "recording:Recording")
for part in PARTS:
    pytest.importorskip(f"nanoengine.{part.split(':')[0]}.capability")
SamplingParams = import_module("nanoengine.sampling.params").SamplingParams

NUM_REQUESTS = 20
FEW = [*range(64, 70)]  # "a" to "f"
CHOICES: list[list[dict[str, Any]]] = [
    [{"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.3}, {"temperature": 1.0}, {"temperature": 2.0}],
    [{}, {}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05, "top_k": 40}],
    [{}, {"repetition_penalty": 1.5}, {"presence_penalty": 1.5, "frequency_penalty": 0.7}, {"frequency_penalty": -1.0}],
    [{}, {"logit_bias": {7: 4.0, 30: -4.0, 90: 2.5}}, {"allowed_token_ids": FEW}, {"allowed_token_ids": FEW}],
    [{}, {}, {"bad_words": ["a", "bc", "bbb", "fed"]}, {"bad_words": [chr(i) for i in range(48, 97)]}],
    [{}, {"stop": ["ba", "fed", "cc"]}, {"stop": ["G", "e"], "min_tokens": 4}, {"stop": ["ab", "dd", "f"]}],
    [{"ignore_eos": True}, {}, {"stop_token_ids": list(range(0, 300, 5)), "min_tokens": 7}],
    [{}, {"logprobs": 0}, {"logprobs": 3}],
    [{}, {}, {}, {"prompt_logprobs": 2}],
    [{}, {}, {}, {"n": 2}, {"n": 1, "best_of": 2}],
    [{}, {}, {}, {}, {"speculate": False}],
]
WAYS: list[dict[str, Any]] = [
    {"async_scheduling": True},
    {"scheduling_policy": "mixed", "max_num_batched_tokens": 24, "max_num_seqs": 5},
    {"num_kv_blocks": 12, "async_scheduling": True, "scheduling_policy": "mixed"},
    {"kv_cache_dtype": "int8", "async_scheduling": True, "long_prefill_token_threshold": 7},
]


def draw_request(number: int) -> tuple[list[int], Any]:
    rng, shared = random.Random(number), random.Random(0)
    prompt = [shared.randrange(256) for _ in range(21)][: rng.choice([0, 0, 15, 16, 21])]
    prompt += [rng.randrange(256) for _ in range(rng.randint(1, 20))]
    asked: dict[str, Any] = {"seed": number, "max_tokens": rng.randint(7, 26)}
    for choices in CHOICES:
        asked |= rng.choice(choices)
    return prompt, SamplingParams(**asked)


REQUESTS = [draw_request(number) for number in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads that native attention can compute."""
    return tiny_checkpoint(tmp_path_factory.mktemp("native"), head_dim=32)


@contextmanager
def opened(model: Path, **options: Any) -> Iterator[tuple[LLM, Speculation | None]]:
    own = SpeculativeDecoding()
    parts: list[Any] = [own]
    for part in PARTS:
        folder, name = part.split(":")
        parts.append(getattr(import_module(f"nanoengine.{folder}.capability"), name)())
    common = {"device": "cpu", "dtype": "bfloat16", "num_kv_blocks": 60, "max_model_len": 80}
    kinds = tuple(each.options for each in parts if each.options is not None)
    llm = LLM.__new__(LLM)
    llm.config = EngineConfig.from_options(str(model), common | options, kinds)
    llm.engine = Startup(llm.config, parts).build()
    if own.speculation is not None:
        own.speculation.costs = Free()
    with llm:
        yield llm, own.speculation


def run(llm: LLM) -> tuple[list[Any], list[Request]]:
    made = [llm.engine.make_request(*request) for request in REQUESTS]
    outputs = llm.run(made)
    return [(output.outputs, output.prompt_logprobs) for output in outputs], made


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_whatever_a_request_asks_for_it_gets_the_same_with_drafts(native: Path, way: dict[str, Any]) -> None:
    """Tokens, texts, ends and log probabilities."""
    same = {name: value for name, value in way.items() if name == "kv_cache_dtype"}
    with opened(native, **same) as (llm, none):
        assert none is None
        assert llm.engine.executor.kernels.name == "native"
        expected, made = run(llm)
        say = knowing(made)
    seen: Counter[str] = Counter()
    with opened(native, speculation="suffix", num_drafts=7, **way) as (llm, own):
        assert own is not None
        for harm in ("knowing", "erring", "mostly wrong"):
            own.proposer = Scripted(HARM[harm](say))
            assert run(llm)[0] == expected
        stats = own.stats
        seen.update(accepted=stats.num_accepted, rejected=stats.num_drafts - stats.num_accepted)
        assert seen["accepted"] > 200
        assert seen["rejected"] > 100
        assert bool(llm.engine.scheduler.num_preemptions) == ("num_kv_blocks" in way)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_draft_model_guesses_beside_the_others(native: Path, kv_cache_dtype: str) -> None:
    """It knows no penalties, bans and biases: where there are none, it is always right."""
    plain = SamplingParams(seed=5, max_tokens=30, ignore_eos=True, top_k=30)
    with opened(native, kv_cache_dtype=kv_cache_dtype) as (llm, _):
        expected, _ = run(llm)
        alone = llm.generate(REQUESTS[0][0], plain)[0].outputs
    options = {"speculation": f"model:{native}", "num_drafts": 5, "async_scheduling": True}
    with opened(native, kv_cache_dtype=kv_cache_dtype, **options) as (llm, own):
        assert own is not None
        own.guess_share = 0.0
        assert llm.generate(REQUESTS[0][0], plain)[0].outputs == alone
        assert own.stats.num_drafts == own.stats.num_accepted >= 24
        assert run(llm)[0] == expected
        assert own.stats.num_drafts > own.stats.num_accepted
        assert llm.engine.executor.recorder is None, "what the draft model does is not recorded"
