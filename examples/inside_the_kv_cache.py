"""A tour of the KV cache: blocks and slots, prefix hits, forks and copies on write, preemption, tiers.

python examples/inside_the_kv_cache.py
"""

import tempfile
from typing import Any

from nanoengine import LLM, BeamSearchParams, SamplingParams
from nanoengine.engine.kv.events import KVEvent
from nanoengine.engine.messages import Tier

PROMPT = """import os
import sys
from typing import Any


class Stack:
    def __init__(self):
        self.items = []

    def push("""
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "block_size": 16,
    "max_model_len": 256,
    "use_tqdm": False,
}


def tables(llm: LLM) -> dict[int, list[int]]:
    return {seq.seq_id: list(seq.block_tables[0]) for seq in llm.engine.scheduler.running}


def blocks_and_hits() -> None:
    with LLM("demo", num_kv_blocks=64, **OPTIONS) as llm:
        events: list[KVEvent] = []
        llm.listen_to_kv_events(events.append)
        engine, manager = llm.engine, llm.engine.scheduler.block_manager
        print("1. blocks and slots")
        request = engine.add_request(PROMPT, SamplingParams(temperature=0.0, max_tokens=8))
        engine.step()
        count = len(request.prompt_token_ids)
        last = (count - 1) // 16
        print(f"   a prompt of {count} tokens, blocks of 16: table {tables(llm)[0]}")
        print(f"   its last token is in slot {tables(llm)[0][last] * 16 + (count - 1) % 16}")
        print(f"   {len(events)} full blocks can be hit; the first has hash {events[0].hash.hex()[:12]}...")  # type: ignore[union-attr]
        while engine.has_unfinished:
            engine.step()

        print("2. a prefix hit")
        engine.add_request(PROMPT + "self, item):", SamplingParams(max_tokens=1))
        engine.step()
        stats = llm.cache_stats
        print(
            f"   {stats.hits_by_tier[Tier.DEVICE]} tokens of the second prompt were there; hit rate {stats.hit_rate:.2f}"
        )

        print("3. forks")
        engine.add_request(PROMPT, SamplingParams(n=3, max_tokens=4), "three")
        engine.step()
        print(f"   three completions share every block: {tables(llm)}")
        engine.step()
        print(f"   each writes its first token: {tables(llm)}; copies on write: {stats.num_copied_blocks}")
        engine.abort("three")
        [output] = llm.beam_search(PROMPT, BeamSearchParams(beam_width=4, max_tokens=16), use_tqdm=False)
        print(f"   beam search, 4 beams, 16 tokens: {stats.num_copied_blocks} copies; {output.outputs[0].text!r}")
        print(f"   free blocks at the end: {manager.pool.num_free} of {manager.pool.num_blocks}")


def preemption() -> None:
    print("4. preemption: 12 requests that need 120 blocks, in a pool of 40")
    prompts = [list(range(300 * i, 300 * i + 96)) for i in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    texts = []
    for mode in ("recompute", "swap"):
        with LLM("demo", num_kv_blocks=40, preemption_mode=mode, **OPTIONS) as llm:
            texts.append([output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)])
            metrics = llm.metrics
            hits = ", ".join(f"{tier.value} {count}" for tier, count in metrics.cache.hits_by_tier.items())
            print(
                f"   {mode}: {metrics.num_preemptions} preemptions, {metrics.steps.prefill_tokens} tokens prefilled, "
                f"hits in tokens: {hits}, blocks saved: {metrics.cache.num_saved_blocks}"
            )
    assert texts[0] == texts[1]


def disk() -> None:
    print("5. a cache that outlives the process")
    with tempfile.TemporaryDirectory() as folder:
        for day in ("yesterday", "today"):
            with LLM("demo", num_kv_blocks=64, kv_disk_path=folder, **OPTIONS) as llm:
                llm.generate(PROMPT, SamplingParams(max_tokens=1), use_tqdm=False)
                print(f"   {day}: {llm.cache_stats.hits_by_tier[Tier.DISK]} tokens of the prompt came from disk")


if __name__ == "__main__":
    blocks_and_hits()
    preemption()
    disk()
