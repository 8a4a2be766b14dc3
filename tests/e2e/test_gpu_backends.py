"""The whole engine through the attention backends for GPUs, on the CPU: packages are stand-ins that check what they are given,
Triton kernels run in their interpreter, and decode steps are recorded and overlap on a device on which time passes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.attention import flash_attn
from tests.attention.stand_ins import installed
from tests.e2e.late import late_device
from tests.e2e.small_engine import assert_idle
from tests.support import backend_of, fill_kv_with_nan, model_runner

LENGTHS = (1, 15, 16, 17, 40, 255, 256, 257, 300)
BACKENDS = {"flash_attn_2": "flash_attn", "flash_attn_3": "flash_attn"}
Tokens = list[list[list[int]]]

WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 97},
    "mixed": {"max_num_batched_tokens": 97, "scheduling_policy": "mixed"},
    "preempted": {"num_kv_blocks": 4, "max_num_seqs": 6},
    "without prefixes": {"enable_prefix_caching": False, "max_num_seqs": 3},
}


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Random ones, and two that begin as the last does."""
    generator = torch.Generator().manual_seed(0)
    random = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]
    return [*random, random[-1][:-3], [*random[-1], 7]]


def params(count: int, max_tokens: int = 6) -> list[SamplingParams]:
    sampled = {"temperature": 0.9, "top_p": 0.9, "top_k": 40}
    return [
        SamplingParams(
            seed=i,
            max_tokens=max_tokens,
            ignore_eos=True,
            n=1 + (i % 4 == 1),
            **(sampled if i % 2 else {"temperature": 0.0}),
        )
        for i in range(count)
    ]


def generate(llm: LLM, lengths: tuple[int, ...] = LENGTHS, max_tokens: int = 6) -> Tokens:
    outputs = llm.generate(prompts(lengths), params(len(lengths) + 2, max_tokens), use_tqdm=False)
    assert_idle(llm)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def open_llm(folder: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 30, "block_size": 256, "kernels": "torch"}
    llm = LLM(str(folder), use_tqdm=False, **defaults | options)
    fill_kv_with_nan(llm)
    return llm


@pytest.fixture(scope="module")
def right(tiny: Path) -> Tokens:
    """What the reference says to each prompt alone."""
    with open_llm(tiny, attention_backend="torch", block_size=16, num_kv_blocks=60) as llm:
        return [
            [completion.token_ids for completion in llm.generate([prompt], one, use_tqdm=False)[0].outputs]
            for prompt, one in zip(prompts(), params(len(LENGTHS) + 2), strict=True)
        ]


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("package", list(BACKENDS))
def test_tokens_are_those_of_the_reference(tiny: Path, right: Tokens, package: str, way: str) -> None:
    with installed(package, exact=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attn, "triton_unsupported_reason", lambda _: "the interpreter is slow")
        with open_llm(tiny, attention_backend=BACKENDS[package], **WAYS[way]) as llm:
            assert backend_of(llm).name == BACKENDS[package]
            assert generate(llm) == right
            assert generate(llm) == right, "with the prefix cache of the first time"
            if way == "preempted":
                assert llm.engine.scheduler.num_preemptions > 0
            assert (llm.cache_stats.num_hit_tokens > 0) == (way != "without prefixes")


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("package", list(BACKENDS))
def test_recorded_and_overlapping_too(tiny: Path, right: Tokens, package: str, way: str) -> None:
    with (
        installed(package, exact=True),
        late_device(can_record=True, seed=0) as device,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(flash_attn, "triton_unsupported_reason", lambda _: "the interpreter is slow")
        backend = BACKENDS[package]
        with open_llm(tiny, attention_backend=backend, async_scheduling=True, **WAYS[way]) as llm:
            assert generate(llm) == right
        assert sum(recording.num_replays for recording in device.recordings) > 0
        assert device.num_overlapping > 0


@pytest.mark.parametrize("package", list(BACKENDS))
def test_half_precision_is_what_the_packages_take(tiny: Path, package: str) -> None:
    """Without the exemption of the exactness tests, the stand-ins refuse anything else, as the packages do."""
    with installed(package), pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attn, "triton_unsupported_reason", lambda _: "the interpreter is slow")
        for dtype in ("bfloat16", "float16"):
            with open_llm(tiny, attention_backend=BACKENDS[package], dtype=dtype) as llm:
                assert all(len(tokens) == 6 for completions in generate(llm) for tokens in completions)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("recorded", [False, True])
def test_triton_kernels_all_the_way(tiny: Path, recorded: bool) -> None:
    """In Triton's interpreter, which is slow: few tokens, and either policy once."""
    pytest.importorskip("triton", reason="Triton is made for Linux on x86-64 alone")
    lengths = (1, 17, 33)
    few: dict[str, Any] = {"block_size": 16, "num_kv_blocks": 14, "max_num_batched_tokens": 40, "max_num_seqs": 4}
    with open_llm(tiny, attention_backend="torch", **few) as llm:
        expected = generate(llm, lengths, max_tokens=3)
    with late_device(can_record=recorded, seed=0) as device:
        few |= {"kernels": "triton", "scheduling_policy": "mixed" if recorded else "prefill_first"}
        with open_llm(tiny, attention_backend="triton", async_scheduling=recorded, **few) as llm:
            assert (model_runner(llm).kernels.name, backend_of(llm).name) == ("triton", "triton")
            assert generate(llm, lengths, max_tokens=3) == expected
        assert (sum(recording.num_replays for recording in device.recordings) > 0) == recorded
