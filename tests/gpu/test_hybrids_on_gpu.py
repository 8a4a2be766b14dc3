"""Models whose layers have states on an NVIDIA GPU in float32: their tokens are the CPU's, however they run; and their
kernels in real sizes: the same bits however a sequence is cut.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.modes import MODES, modes_of, running_in
from nanoengine import LLM, RequestOutput, SamplingParams
from nanoengine.features.kv_groups.state_keeper import StateKeeper
from tests.e2e.small_engine import assert_idle
from tests.features.kv_groups.states import saying, snapshots_of
from tests.features.speculation.scripted import Scripted, erring
from tests.gpu.marks import needs_gpu
from tests.gpu.test_demo_on_gpu import ON_GPU, clear_tokens
from tests.kernels.recurrences import check_recurrences
from tests.models.families import engine, family_checkpoint
from tests.support import fill_kv_with_nan, model_runner

FAMILIES = ("LFM2", "Qwen3.5", "Qwen3-Next", "Granite 4")
NEW = 30
SLACK = 1 << 30
"""CUDA's own memory for a process and its kernels."""


def checkpoint(folder: Path, shape: str, **more: Any) -> Path:
    """Heads of a power of two, as Triton's attention wants them."""
    return family_checkpoint(folder, shape, head_dim=16, **more)


# ---- engines


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(250) for _ in range(70)]
    return [
        shared[: rng.choice([0, 40, 70])] + [rng.randrange(250) for _ in range(rng.randint(1, 60))] for _ in range(8)
    ]


def ask(llm: LLM, asked: list[list[int]]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=2)
    outputs = llm.generate(asked, params, use_tqdm=False)
    assert_idle(llm)
    return outputs


WAYS: dict[str, dict[str, Any]] = {
    "room": {},
    "small mixed steps": {"max_num_batched_tokens": 7, "max_num_seqs": 3, "scheduling_policy": "mixed"},
    "tiny pool": {"num_kv_blocks": 33},
    "drafts": {"num_kv_blocks": 60, "speculation": "ngram", "num_drafts": 5},
}


@pytest.mark.parametrize("shape", [pytest.param(shape, marks=needs_gpu) for shape in FAMILIES])
def test_tokens_are_those_of_the_cpu_in_every_way_and_mode(tmp_path: Path, shape: str) -> None:
    """Up to the first where two tokens are nearly as likely."""
    folder, asked, counts = checkpoint(tmp_path, shape), prompts(), dict.fromkeys(WAYS, 0)
    with engine(
        folder, device="cpu", kernels="torch", attention_backend="torch", max_num_seqs=1, enable_prefix_caching=False
    ) as llm:
        alone = [ask(llm, [prompt])[0] for prompt in asked]
    exact = [clear_tokens(output) for output in alone]
    assert sum(map(len, exact)) > 0.6 * NEW * len(asked), "hardly any token is a close call"
    answers: list[tuple[list[int], list[float]]] = [(output.outputs[0].token_ids, []) for output in alone]
    for name, way in WAYS.items():
        with engine(folder, **{"max_model_len": 400, "max_num_seqs": 16} | ON_GPU | way) as llm:
            if name == "drafts":
                speculation = llm.built.capabilities["speculation"].speculation
                speculation.proposer = Scripted(erring(0.3)(saying(asked, answers)))
            assert modes_of(llm) == list(MODES)
            for mode in MODES:
                llm.reset_prefix_cache()
                fill_kv_with_nan(llm)
                with running_in(llm, mode):
                    for _ in range(2):  # again from the cache
                        found = [output.outputs[0].token_ids for output in ask(llm, asked)]
                        same = [tokens[: len(clear)] for tokens, clear in zip(found, exact, strict=True)]
                        assert same == exact, (name, str(mode))
            stats = llm.metrics.speculation
            counts[name] = {
                "room": snapshots_of(llm).num_stored,
                "small mixed steps": snapshots_of(llm).num_restored,
                "tiny pool": llm.metrics.num_preemptions,
                "drafts": 0 if stats is None else min(stats.num_accepted, stats.num_drafts - stats.num_accepted),
            }[name]
    assert all(counts.values()), counts


# ---- memory


@pytest.mark.parametrize("utilization", [pytest.param(own, marks=needs_gpu, id=str(own)) for own in (0.3, 0.9)])
def test_states_are_counted_where_the_pool_is_sized(tmp_path: Path, utilization: float) -> None:
    """Slots of 6 MiB: those of 256 sequences and of the snapshots take 2.6 GB, more than what is tolerated below. K/V of 256
    sequences would take 512 GiB, more than a card has: the pool's size follows from the memory alone.
    """
    large = {f"linear_num_{own}_heads": count for own, count in (("key", 16), ("value", 32))}
    large |= {f"linear_{own}_head_dim": 128 for own in ("key", "value")}
    large |= {"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 1 << 20}
    folder = checkpoint(tmp_path, "Qwen3.5", **large)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    options: dict[str, Any] = {"num_kv_blocks": None, "block_size": 256, "gpu_memory_utilization": utilization}
    with engine(folder, device="cuda", dtype="bfloat16", **options) as llm:
        runner = model_runner(llm)
        [states] = [part.pool.slots.nbytes for part in runner.parts if isinstance(part, StateKeeper)]
        assert states > 2 * SLACK
        ask(llm, [[i + j for j in range(90)] for i in range(160)])
        used = total - torch.cuda.mem_get_info()[0]
        assert used <= utilization * total + SLACK
        pool = sum(tensor.nbytes for place in runner.kv_cache.pool_layers for tensor in place)
        assert pool + states > utilization * total - (total - free) - 8 * SLACK, "no more is left over than steps take"


# ---- kernels in real sizes


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=needs_gpu) for seed in range(4)])
def test_bits_do_not_depend_on_cuts_in_real_sizes(seed: int) -> None:
    from nanoengine.kernels.triton.operations import TritonKernels

    check_recurrences(TritonKernels(), seed, "cuda", real=True)
