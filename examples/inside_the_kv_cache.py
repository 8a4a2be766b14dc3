"""A tour of the KV cache: blocks and slots, prefix hits, several completions, preemption, host memory, disk.

python examples/inside_the_kv_cache.py
"""

import tempfile
from typing import Any

from nanoengine import LLM, BeamSearchParams, SamplingParams
from nanoengine.features.observability.kv_events import BlockStored, KVEvent

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
    return {seq.index: list(seq.block_tables[0]) for seq in llm.engine.scheduler.running}


def blocks_and_hits() -> None:
    with LLM("demo", num_kv_blocks=64, **OPTIONS) as llm:
        events: list[KVEvent] = []
        llm.listen_to_kv_events(events.append)
        engine, blocks = llm.engine, llm.engine.scheduler.blocks
        print("1. blocks and slots")
        request = engine.make_request(PROMPT, SamplingParams(temperature=0.0, max_tokens=8))
        engine.submit(request)
        engine.step()
        count = len(request.prompt_token_ids)
        table = tables(llm)[0]
        print(f"   a prompt of {count} tokens, blocks of 16: table {table}")
        print(f"   its last token is in slot {table[(count - 1) // 16] * 16 + (count - 1) % 16}")
        first = events[0]
        assert isinstance(first, BlockStored)
        print(f"   {len(events)} full blocks can be hit; the first has hash {first.hash.hex()[:12]}...")
        while engine.has_unfinished:
            engine.step()

        print("2. a prefix hit")
        [output] = llm.generate(PROMPT + "self, item):", SamplingParams(max_tokens=1), use_tqdm=False)
        print(f"   of {len(output.prompt_token_ids)} tokens of the second prompt {output.num_cached_tokens} were there")

        print("3. several completions of a prompt that nobody has computed")
        request = engine.make_request(PROMPT[7:], SamplingParams(n=3, max_tokens=4))
        engine.submit(request)
        engine.step()
        print(f"   step 1: one computes the prompt, two wait for its blocks: {tables(llm)}")
        engine.step()
        print(f"   step 2: they share its full blocks, and each computes the tokens behind them: {tables(llm)}")
        engine.abort(request.request_id)
        [output] = llm.beam_search(PROMPT, BeamSearchParams(beam_width=4, max_tokens=16), use_tqdm=False)
        print(f"   beam search, 4 beams, 16 tokens: {output.outputs[0].text!r}")
        print(f"   free blocks at the end: {blocks.num_free} of {blocks.num_blocks}")


def preemption() -> None:
    print("4. preemption: 12 requests that need 120 blocks, in a pool of 40")
    prompts = [list(range(300 * i, 300 * i + 96)) for i in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    texts = []
    for mode in ("recompute", "swap"):
        with LLM("demo", num_kv_blocks=40, preemption_mode=mode, **OPTIONS) as llm:
            texts.append([output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)])
            metrics = llm.metrics
            print(
                f"   {mode}: {metrics.num_preemptions} preemptions, {metrics.steps.prefill_tokens} tokens prefilled, "
                f"{metrics.cache.num_resumed_hit_tokens} were still cached when a sequence resumed"
            )
            if metrics.offload is not None:
                saved, loaded = metrics.offload.num_saved_blocks, metrics.offload.num_loaded_blocks
                print(f"      blocks that went to host memory: {saved}, that came back: {loaded}")
    assert texts[0] == texts[1]


def disk() -> None:
    print("5. a cache that outlives the process")
    with tempfile.TemporaryDirectory() as folder:
        for day in ("yesterday", "today"):
            with LLM("demo", num_kv_blocks=64, kv_disk_path=folder, **OPTIONS) as llm:
                [output] = llm.generate(PROMPT, SamplingParams(max_tokens=1), use_tqdm=False)
                print(f"   {day}: {output.num_cached_tokens} tokens of the prompt came from disk")


if __name__ == "__main__":
    blocks_and_hits()
    preemption()
    disk()
