"""Models whose layers have states, beside transformers on the same random weights; the share of the recurrence, and snapshots.

python -m benchmarks.hybrids qwen3.5-0.8b FOLDER
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.random_weights import write_checkpoint
from nanoengine import LLM, SamplingParams

PROMPT, NEW = 512, 24


def seconds(work: Callable[[], Any], times: int = 3) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return median(taken)


def measure(folder: str) -> None:
    draw = torch.Generator().manual_seed(0)

    def prompts(count: int, length: int = PROMPT) -> list[list[int]]:
        return torch.randint(0, 60000, (count, length), generator=draw).tolist()

    with LLM(folder, tokenizer="demo", device="cpu", max_num_seqs=16, max_model_len=2048, use_tqdm=False) as llm:

        def generate(count: int, length: int, new: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
            llm.generate(prompts(count, length), params, use_tqdm=False)

        generate(16, 16, 4)
        prefill = seconds(lambda: generate(1, PROMPT, 1))
        one = seconds(lambda: generate(1, 16, NEW)) - seconds(lambda: generate(1, 16, 1))
        many = seconds(lambda: generate(16, 16, NEW), 1) - seconds(lambda: generate(16, 16, 1), 1)
        print(
            f"nanoengine: prefill {prefill / PROMPT * 1e3:.2f} ms a token; decode {one / (NEW - 1) * 1e3:.1f} ms a token, "
            f"16 streams {many / (NEW - 1) / 16 * 1e3:.1f} ms a token"
        )
        recurrence(llm, prefill)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        ids = torch.tensor(prompts(1))
        model(ids[:, :16])
        prefill = seconds(lambda: model(ids, logits_to_keep=1))
        cache = model(ids[:, :16], use_cache=True).past_key_values
        one = seconds(lambda: model(ids[:, :1], past_key_values=cache, use_cache=True), 12)
    print(f"transformers: prefill {prefill / PROMPT * 1e3:.2f} ms a token; decode {one * 1e3:.1f} ms a token")


def recurrence(llm: LLM, prefill: float) -> None:
    """What convolutions and recurrences take of a prefill, and a snapshot."""
    from nanoengine.kernels.recurrences import StateRuns
    from nanoengine.kv_groups.state_pool import StateKeeper

    runner: Any = llm.engine.executor
    runner = getattr(runner, "executor", runner)
    keeper = next(part for part in runner.parts if isinstance(part, StateKeeper))
    runs = StateRuns(torch.tensor([0], dtype=torch.int32), torch.tensor([0, PROMPT], dtype=torch.int32))
    mixer: Any = next(iter(keeper.mixers.values()))
    states = keeper.pool.layers[0]
    projected = torch.randn(PROMPT, sum(mixer.in_proj.out_features), dtype=torch.bfloat16)
    share = seconds(lambda: mixer.mix(projected, states, runs), 7) * len(keeper.mixers) / prefill
    size = keeper.pool.slots[0].nbytes
    copied = seconds(lambda: keeper.pool.copy(0, len(keeper.pool.slots) - 1), 7)
    print(
        f"what mixes tokens: {100 * share:.1f} % of a prefill; a snapshot: {size / 2**20:.2f} MiB, {copied * 1e3:.2f} ms"
    )


if __name__ == "__main__":
    shape, folder = sys.argv[1:]
    if shape != "-":
        write_checkpoint(shape, folder)
    else:
        measure(folder)
