"""The engine of `nanoengine.core` with all capabilities says what `LLM` says, to the bit: tokens, texts and log probabilities.

It goes when `LLM` runs on the core.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from nanoengine.core_builder import capabilities, read_config

from nanoengine import RequestOutput
from nanoengine.core.outputs import RequestOutput as CoreOutput
from nanoengine.core.startup import Startup
from nanoengine.sampling.params import SamplingParams
from tests.e2e.one_number import MAX_LEN, Asked, Model, checkpoint, draw_model, draw_request, opened
from tests.kernels.draws import REASON
from tests.support import threads

pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")


def values(entries: Any) -> Any:
    return [
        None if entry is None else {token: (own.logprob, own.rank) for token, own in entry.items()}
        for entry in entries or ()
    ]


def said(output: RequestOutput | CoreOutput) -> list[Any]:
    ends = [(own.index, own.token_ids, own.text, own.finish_reason, own.stop_reason) for own in output.outputs]
    sums = [(own.cumulative_logprob, values(own.logprobs)) for own in output.outputs]
    return [output.prompt_token_ids, values(output.prompt_logprobs), ends, sums]


def translated(params: Any) -> SamplingParams:
    names = [own.name for own in fields(SamplingParams) if own.init]
    return SamplingParams(**{name: getattr(params, name) for name in names})


def draw_options(rng: random.Random, folder: Path) -> dict[str, Any]:
    is_cached = rng.random() < 0.8
    tiers: list[Mapping[str, Any]] = [{}, {"preemption_mode": "swap"}, {"kv_disk_path": str(folder / "kv")}]
    return {
        "max_num_batched_tokens": rng.choice([7, 64, 300, 8192]),
        "max_num_seqs": rng.choice([4, 6, 256]),
        "scheduling_policy": rng.choice(["prefill_first", "mixed"]),
        "long_prefill_token_threshold": rng.choice([None, 5, 40]),
        "block_size": rng.choice([16, 32, 128]),
        "enable_prefix_caching": is_cached,
        "async_scheduling": rng.random() < 0.5,
        "enforce_eager": rng.random() < 0.5,
        "speculation": rng.choice([None, "ngram", "suffix"]),
        "num_threads": rng.choice([1, 2]),
        **(rng.choice(tiers) if is_cached else {}),
    }


def run_on_the_core(
    model: Model,
    path: Path,
    requests: list[Asked],
    rng: random.Random,
    folder: Path,
    seen: Counter[str],
    *,
    is_crowded: bool,
) -> list[list[list[Any]]]:
    """What is said in two turns: the second finds what the first has left."""
    drawn = {"device": "cpu", "max_model_len": MAX_LEN, **model.options, **draw_options(rng, folder)}
    parts = capabilities()
    probe = Startup(read_config(str(path), drawn | {"num_kv_blocks": 4000, "kv_disk_path": None}, parts), parts)
    probe.build().close()
    least = probe.blocks_needed(MAX_LEN)
    options = drawn | {"num_kv_blocks": least + 3 if is_crowded else 12 * least}
    parts = capabilities()
    startup = Startup(read_config(str(path), options, parts), parts)
    engine, turns = startup.build(), []
    for place in startup.runner.kv_cache.places:
        for tensor in place:
            tensor.fill_(-1 if tensor.dtype is torch.int8 else float("nan"))
    for _ in range(2):
        made = [
            engine.make_request(prompt, translated(params), client=rng.choice("ab"), priority=rng.choice([0, 0, -1]))
            for prompt, params in requests
        ]
        for request in rng.sample(made, len(made)):
            engine.submit(request)
        for _ in range(50_000):
            if not engine.has_unfinished:
                break
            engine.step()
        assert [request.error for request in made] == [None] * len(made), options
        turns.append([said(request.output()) for request in made])
        seen["cached"] += sum(request.output().num_cached_tokens for request in made)
    seen["preempted"] += engine.scheduler.num_preemptions
    engine.close()
    return turns


@pytest.mark.parametrize("seed", [1, 3, 5, 6, 7])
def test_the_core_says_what_llm_says(seed: int, tmp_path: Path) -> None:
    rng, seen = random.Random(seed), Counter[str]()
    model = draw_model(rng)
    requests = [draw_request(rng) for _ in range(8)]
    alone = {
        "max_num_seqs": 3,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "num_kv_blocks": 800,
        "num_threads": 1,
    }
    with checkpoint(tmp_path, model.shape, model.seed, **model.overrides) as path:
        with threads(1), opened(model, path, **alone) as llm:
            expected = [said(llm._run([llm.engine.make_request(*request)], use_tqdm=False)[0]) for request in requests]
        for way in range(3):
            folder = tmp_path / f"way {way}"
            folder.mkdir()
            with threads(rng.choice([1, 2])):
                turns = run_on_the_core(model, path, requests, rng, folder, seen, is_crowded=way == 0)
            for found in turns:
                for got, want in zip(found, expected, strict=True):
                    assert got == want, (model, way)
    assert seen["cached"], seen
