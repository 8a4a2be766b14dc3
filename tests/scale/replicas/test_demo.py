"""Two real engines in processes compute what one computes, whatever happens to them."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.builder import is_installed
from nanoengine.errors import InvalidConfig, InvalidSamplingParams
from nanoengine.scale.replicas.engine import ReplicatedEngine
from tests.scale.replicas.test_processes import busy, signal_all, wait_for
from tests.scale.seen import told

OPTIONS: dict[str, Any] = {"num_kv_blocks": 60, "max_num_batched_tokens": 48, "max_model_len": 256, "use_tqdm": False}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
PROMPTS: list[Any] = [
    "Once upon a time",
    "The king said to the queen that",
    [5, 6, 7, 8] * 12,
    "def binary_search(",
    "class Stack:",
    "import",
]
PARAMS = [
    SamplingParams(temperature=1.0, seed=3, max_tokens=40, n=2, logprobs=2, presence_penalty=0.3, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, max_tokens=60, structured_outputs={"json": json.dumps(SCHEMA)}, logprobs=0),
    SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, stop=["zzz"], repetition_penalty=1.2),
    SamplingParams(
        temperature=1.0, max_tokens=40, stop=["\n"], include_stop_str_in_output=True, min_tokens=9, prompt_logprobs=1
    ),
    SamplingParams(
        temperature=1.2, seed=9, max_tokens=30, best_of=3, n=2, top_k=30, frequency_penalty=0.5, logit_bias={9: 2.0}
    ),
    SamplingParams(temperature=0.9, max_tokens=35, top_p=0.9, min_p=0.01, ignore_eos=True),  # without a seed
]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with LLM("demo", num_threads=1, **OPTIONS) as llm:
        return told(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = {"replicas": 2, "num_threads": 1}
    with LLM("demo", pooling="mean", **options, **OPTIONS) as llm:
        yield llm


def replicas_of(llm: LLM) -> ReplicatedEngine:
    assert isinstance(llm.engine, ReplicatedEngine)
    return llm.engine


@pytest.mark.parametrize("kills", [(), (3, 21)], ids=str)
def test_all_requests_get_what_one_engine_gives(llm: LLM, expected: list[Any], kills: tuple[int, ...]) -> None:
    """Although replicas are killed when the longest answer has so many tokens."""
    engine, due = replicas_of(llm), list(kills)
    engine._seeds = random.Random(llm.config.seed)  # of requests without one
    num_lost = engine.supervisor.num_lost

    def after_step(_: object) -> None:
        longest = max((len(s.output_token_ids) for r in engine.requests.values() for s in r.sequences), default=0)
        were_lost = engine.supervisor.num_lost - num_lost == len(kills) - len(due)  # nobody is killed twice
        if due and longest >= due[0] and were_lost:
            due.pop(0)
            signal_all(busy(engine)[:1], signal.SIGKILL)

    assert told(llm.run(llm.make_requests(PROMPTS, PARAMS), after_step)) == expected
    assert not due
    # A replica may have said all that was wanted before it was killed: its loss is known behind the last token.
    wait_for(engine, lambda: engine.supervisor.num_lost == num_lost + len(kills))
    wait_for(engine, lambda: engine.supervisor.num_ready == 2)


def test_embeddings_errors_metrics_and_the_cache_pass_through(llm: LLM) -> None:
    engine = replicas_of(llm)
    with LLM("demo", num_threads=1, pooling="mean", **OPTIONS) as one:
        want = one.embed(["a", "another text"], use_tqdm=False)
    got = llm.embed(["a", "another text"], use_tqdm=False)
    assert [own.embedding.tolist() for own in got] == [own.embedding.tolist() for own in want]
    with pytest.raises(InvalidSamplingParams, match="vocabulary"):
        llm.generate("x", SamplingParams(stop_token_ids=[10**6]))
    forbidden = SamplingParams(allowed_token_ids=[5], logit_bias={5: -100.0}, max_tokens=3, temperature=0)
    assert len(llm.generate("x", forbidden, use_tqdm=False)[0].outputs[0].token_ids) == 3
    prompt = list(range(300, 364))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    [first] = llm.generate([prompt], params, use_tqdm=False)
    [second] = llm.generate([prompt], params, use_tqdm=False)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert second.outputs == first.outputs
    assert llm.metrics.cache.num_hit_tokens >= 48
    assert llm.reset_prefix_cache()
    [third] = llm.generate([prompt], params, use_tqdm=False)
    assert third.num_cached_tokens == 0
    assert not engine.fleet.running


@pytest.mark.skipif(
    not is_installed("kv_offload"), reason="host memory and disk (nanoengine/features/kv_offload) are not installed"
)
def test_replicas_keep_kv_in_host_memory_and_in_files(tmp_path: Path, expected: list[Any]) -> None:
    own = {"replicas": 2, "num_threads": 1, "kv_host_memory": "1MiB", **OPTIONS}
    for _ in range(2):
        with LLM("demo", kv_disk_path=str(tmp_path), **own) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            ready = {slot.current.ready for slot in replicas_of(llm).supervisor.slots if slot.current is not None}
        assert told(outputs) == expected
        assert len(ready) == 1, "their caches have the same hashes, so the router knows what each of them has"
    assert outputs[2].num_cached_tokens == 32, "it was read from a file"


def test_a_model_that_cannot_be_computed_is_an_error_at_once() -> None:
    with pytest.raises(InvalidConfig, match="max_model_len is 99999"):
        LLM("demo", replicas=2, **(OPTIONS | {"max_model_len": 99999}))
    with pytest.raises(InvalidConfig, match=r"max_lora_bytes is 4 GiB, but replicas take at most 1\.999 GiB"):
        LLM("demo", replicas=2, enable_lora=True, max_lora_bytes="4GiB", use_tqdm=False)
    with pytest.raises(InvalidConfig, match="replicas is -1"):
        LLM("demo", replicas=-1)
