"""Ranks that have some tokens each: where they keep them, and that their bits are those of one device."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.errors import InvalidConfig
from nanoengine.scale.parallel.context import local_slots
from tests.e2e.drawn_models import REASON
from tests.models.families import SHAPES, family_checkpoint
from tests.scale.parallel.groups import by_all, let_group_compute, open_group
from tests.scale.parallel.test_exact import WAYS, quantized
from tests.scale.seen import told
from tests.support import fill_kv_with_nan, forced_logits, model_runner, threads

needs_native = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")

TOKENS = [(37 * i + i * i) % 256 for i in range(800)]
SHAPES_WITHOUT_WINDOWS = (
    "LFM2, biases, four taps, adjusted",
    "Qwen3.5",
    "Llama, untied, odd heads",
    "Phi3, half rotated",
    "SmolLM2's shape",
    "Qwen2, tied, 7 heads",
    "OLMo2, biases, no groups",
    "Qwen3-MoE",
    "gpt-oss, full layers, no biases",
)
CASES = [(shape, 2 + i % 2, list(WAYS)[i % 4]) for i, shape in enumerate(SHAPES_WITHOUT_WINDOWS)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_slots_are_those_of_the_formula(ranks: int) -> None:
    block_size, table = 3072, random.Random(ranks).sample(range(1, 99), 3)
    positions = range(3 * block_size)
    slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in positions])
    found = [local_slots(slots, block_size, ranks, rank).tolist() for rank in range(ranks)]
    for p in positions:
        within = p % block_size
        owner = within // 256 % ranks
        own = table[p // block_size] * (block_size // ranks) + within // (256 * ranks) * 256 + within % 256
        assert [slots_of_rank[p] for slots_of_rank in found] == [own if rank == owner else -1 for rank in range(ranks)]
    for slots_of_rank in found:  # nobody's slot is another's
        kept = [slot for slot in slots_of_rank if slot >= 0]
        assert len(set(kept)) == len(kept) == len(positions) // ranks


def test_padding_has_no_slot() -> None:
    assert local_slots(torch.tensor([-1, 0]), 512, 2, 0).tolist() == [-1, 0]


@needs_native
@pytest.mark.parametrize(("shape", "size", "way"), CASES, ids=str)
def test_logits_are_those_of_one_device(tmp_path: Path, shape: str, size: int, way: str) -> None:
    overrides: dict[str, Any] = {"head_dim": 32, "max_position_embeddings": 1200}
    if way == "Q4_K" and 256 % SHAPES[shape][1].get("num_attention_heads", 4) == 0:
        overrides |= {"hidden_size": 256, "intermediate_size": 256}
    folder = family_checkpoint(tmp_path, shape, **overrides)
    given = {"num_kv_blocks": 4, "num_threads": 1, "kernels": "native", "block_size": 256 * size} | WAYS[way]

    def compute(llm: LLM) -> torch.Tensor:
        return forced_logits(llm, TOKENS, num_prompt_tokens=780, chunk=600)

    with threads(1), quantized(way), ExitStack() as stack:
        alone = stack.enter_context(LLM(str(folder), device="cpu", use_tqdm=False, **given))
        fill_kv_with_nan(alone)
        right = compute(alone)
        ranks = stack.enter_context(open_group(size, folder, decode_context_parallel_size=size, **given))
        for logits in by_all(ranks, compute):
            assert torch.equal(logits, right)
        layer = alone.built.models.model_config.attention_layers[0]
        own, whole = (model_runner(llm).kv_cache.layers[layer][0] for llm in (ranks[0], alone))
        assert own.nbytes * size == whole.nbytes


@needs_native
def test_requests_get_what_they_get_alone(tmp_path: Path) -> None:
    """Decodes beside chunks, prefixes that are shared, drafts, preemption; and so little room that attention is in pieces."""
    folder = family_checkpoint(tmp_path, "SmolLM2's shape", head_dim=32, max_position_embeddings=1200)
    rng = random.Random(7)
    common = [rng.randrange(256) for _ in range(600)]
    prompts = [common + [rng.randrange(256) for _ in range(count)] for count in (1, 30, 405)] + [common[:40]]
    params = [
        SamplingParams(temperature=own, seed=9, max_tokens=count, ignore_eos=True, logprobs=1)
        for own, count in ((0.0, 60), (1.0, 30), (0.8, 90), (1.0, 90))
    ]
    options = {"block_size": 512, "max_num_batched_tokens": 300, "num_threads": 1, "speculation": "ngram"}
    options |= {"scheduling_policy": "mixed", "use_tqdm": False, "device": "cpu", "enforce_eager": True}
    with threads(1), ExitStack() as stack:
        alone = stack.enter_context(LLM(str(folder), num_kv_blocks=30, **options))
        expected = [
            told(alone.generate([own], [how], use_tqdm=False))[0] for own, how in zip(prompts, params, strict=True)
        ]
        both = {"decode_context_parallel_size": 2, "num_kv_blocks": 5}
        llm = let_group_compute(stack.enter_context(open_group(2, folder, **options, **both)))
        for _ in range(2):
            found = told(llm.generate(prompts, params, use_tqdm=False))
            assert found == expected
        assert llm.metrics.num_preemptions > 0
        assert llm.metrics.cache.num_hit_tokens > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size is 2: it must be 1, or as much as"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "block_size is 16: it must be a multiple of 512",
        ),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "attention_backend": "torch"},
            "which only the native attention backend computes, not torch",
        ),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    if REASON is not None and "torch" not in options.values():
        pytest.skip(f"no native kernels: {REASON}")
    with pytest.raises(InvalidConfig, match=message):
        LLM("demo", use_tqdm=False, device="cpu", replicas=0, **options)


def test_windows_are_refused_by_name(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, "Mistral, a window")
    both = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "block_size": 512}
    with pytest.raises(InvalidConfig, match="layers of the model see windows or chunks of 13 tokens: use 1"):
        LLM(str(folder), use_tqdm=False, device="cpu", replicas=0, **both)
