"""Models whose layers have states, beside transformers on the same random weights; the share of the recurrence, and snapshots.

python -m benchmarks.hybrids qwen3.5-0.8b FOLDER    writes the weights
python -m benchmarks.hybrids - FOLDER               measures; a .gguf file alone, without transformers
python -m benchmarks.hybrids tiers FOLDER           measures the way of snapshots to host memory and files
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
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
    if folder.endswith(".gguf"):
        return
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


def tiers(folder: str, length: int = 1024) -> None:
    """The first token of a prompt whose K/V and states come from somewhere; and the copies of one snapshot."""
    draw = torch.Generator().manual_seed(1)
    prompts: list[list[int]] = torch.randint(0, 60000, (3, length), generator=draw).tolist()
    options: dict[str, Any] = {
        "num_kv_blocks": length // 16 + 40,
        "snapshot_memory": 64 << 20,
        "max_model_len": length + 9,
    }
    found: dict[str, list[float]] = {}

    def opened(**more: Any) -> LLM:
        return LLM(folder, tokenizer="demo", device="cpu", max_num_seqs=4, use_tqdm=False, **options, **more)

    def first_token(llm: LLM, prompt: list[int], where: str) -> None:
        start = time.perf_counter()
        [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        found.setdefault(where, []).append(time.perf_counter() - start)
        assert output.num_cached_tokens == (0 if where == "computed" else (length - 1) // 16 * 16), where

    with opened(kv_host_memory=2 << 30) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
        for prompt in prompts:
            first_token(llm, prompt, "computed")
            first_token(llm, prompt, "the pool")
        for prompt in prompts:
            first_token(llm, prompt, "host memory")
        copies(llm)
    with tempfile.TemporaryDirectory() as kv:
        with opened(kv_disk_path=kv) as llm:
            for prompt in prompts:
                first_token(llm, prompt, "computed")
        with opened(kv_disk_path=kv) as llm:
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
            for prompt in prompts:
                first_token(llm, prompt, "files")
    for where, taken in found.items():
        print(f"first token of {length}, {where}: {1e3 * median(taken):.0f} ms")


def copies(llm: LLM) -> None:
    """One snapshot to host memory, back, to files and back; and the K/V of as many blocks as bring it once, 512 tokens."""
    from nanoengine.kv_offload.block_copier import BlockCopier
    from nanoengine.kv_offload.kv_folder import KVFolder
    from nanoengine.kv_offload.messages import Copy, Place, Tier

    runner: Any = llm.engine.executor
    runner = getattr(runner, "executor", runner)
    copier = next(part for part in runner.parts if isinstance(part, BlockCopier))
    states = llm.built.capabilities["kv_offload"].offload.state_groups
    for what, tier, count in (("a snapshot", Tier.STATES, len(states)), ("K/V of 512 tokens", Tier.POOL, 32)):
        out = [Copy(Place(tier, 1 + i), Place(Tier.HOST, i)) for i in range(count)]
        back = [Copy(target, source) for source, target, _ in out]
        saved, loaded = (seconds(partial(copier.copy, own), 9) for own in (out, back))
        with tempfile.TemporaryDirectory() as path:
            files = KVFolder(Path(path), "model", copier.block_bytes, 1 << 30)

            def each(work: Callable[..., Any], count: int = count) -> None:
                for i in range(count):
                    work(f"{i:032x}-0", b"", copier.host[i].numpy().data)

            written, read = seconds(partial(each, files.write), 5), seconds(partial(each, files.read), 5)
        print(
            f"{what}, {count} blocks of {copier.block_bytes / 2**10:.0f} KiB: to host memory {saved * 1e3:.1f} ms, back "
            f"{loaded * 1e3:.1f}; to files {written * 1e3:.0f}, back {read * 1e3:.0f}"
        )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"{__doc__}")
    shape, folder = sys.argv[1:]
    if shape == "tiers":
        tiers(folder)
    elif shape != "-":
        write_checkpoint(shape, folder)
    else:
        measure(folder)
