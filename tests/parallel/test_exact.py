"""A group computes what one device does, to the bit: logits at every position, and the K/V of every head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM
from nanoengine.kernels.native_operations import unsupported_reason
from nanoengine.models import capability as models
from tests.e2e.drawn_models import WITHOUT, in_q4_k
from tests.models.families import SHAPES, WITH_STATES, family_checkpoint
from tests.parallel.groups import by_all, open_group
from tests.quantization.packed_models import awq_form, mxfp4_folder, pack_folder
from tests.support import backend_of, fill_kv_with_nan, forced_logits, model_runner, threads

REASON = unsupported_reason(torch.device("cpu"), torch.bfloat16)
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")

TOKENS = [(37 * i + i * i) % 256 for i in range(45)]
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    "Q4_K": {"dtype": "bfloat16", "quantization": "int8"},
    "AWQ": {"dtype": "float32"},
}
DIFFERENT = [
    own for own in SHAPES if own not in (*WITHOUT, *WITH_STATES) and not own.startswith("Llama, rope")
]  # every rank has all angles; ranks do not share states
CASES = [(shape, 2 + i % 3, list(WAYS)[i % 4]) for i, shape in enumerate(DIFFERENT)]
CASES += [("SmolLM2's shape", size, way) for size in (2, 3, 4) for way in WAYS]
CASES = list(dict.fromkeys(CASES))


@contextmanager
def quantized(way: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if way == "Q4_K":
            patch.setattr(models, "quantizer", lambda *_: in_q4_k)
        yield


def check(folder: Path, size: int, **options: Any) -> None:
    given = {"num_kv_blocks": 60, "num_threads": 1, "max_model_len": 96, "kernels": "native"} | options

    def compute(llm: LLM) -> torch.Tensor:
        return forced_logits(llm, TOKENS, num_prompt_tokens=38, chunk=20)

    with ExitStack() as stack:
        alone = stack.enter_context(LLM(str(folder), device="cpu", use_tqdm=False, **given))
        fill_kv_with_nan(alone)
        right = compute(alone)
        assert right.std() > 0.1
        ranks = stack.enter_context(open_group(size, folder, **given))
        for logits in by_all(ranks, compute):
            assert torch.equal(logits, right)
        seen: list[set[int]] = [set() for _ in ranks]
        for rank, llm in enumerate(ranks):
            group = llm.built.capabilities["parallel"].group
            heads = group.shares.kv_heads[rank]
            seen[rank] = set(heads)
            for own, whole in zip(model_runner(llm).kv_cache.layers, model_runner(alone).kv_cache.layers, strict=True):
                for of_rank, of_all in zip(own, whole, strict=True):
                    part = of_all[:, :, heads.start : heads.stop]
                    assert torch.equal(part.contiguous().view(torch.uint8), of_rank.contiguous().view(torch.uint8))
        assert len(set.union(*seen)) == alone.built.models.model_config.num_kv_heads


@pytest.mark.parametrize(("shape", "size", "way"), CASES, ids=lambda own: str(own))
def test_logits_and_kv_are_those_of_one_device(tmp_path: Path, shape: str, size: int, way: str) -> None:
    overrides: dict[str, Any] = {"head_dim": 32}
    if way == "Q4_K" and 256 % SHAPES[shape][1].get("num_attention_heads", 4) == 0:
        overrides |= {"hidden_size": 256, "intermediate_size": 256}  # blocks of 256
    if way == "AWQ":
        overrides |= {"hidden_size": 144, "intermediate_size": 80}
    size = min(size, SHAPES[shape][1].get("num_attention_heads", 4))
    folder = family_checkpoint(tmp_path / "model", shape, **overrides)
    if way == "AWQ":
        folder = pack_folder(folder, tmp_path / "packed", awq_form())
    with threads(1), quantized(way):
        check(folder, size, **WAYS[way])


def test_experts_that_stay_in_4_bits(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    folder = family_checkpoint(tmp_path / "model", "gpt-oss", head_dim=32, **sizes)
    with threads(1):
        check(mxfp4_folder(folder, tmp_path / "packed"), 3, dtype="bfloat16")


@pytest.mark.parametrize(("shape", "size"), [("Mistral, no window", 2), ("OLMo2", 3)])
def test_heads_that_torch_attends_to(tmp_path: Path, shape: str, size: int) -> None:
    """Of a size that the native backend does not compute; torch promises no bits."""
    folder = family_checkpoint(tmp_path, shape, head_dim=20)
    given = {"num_kv_blocks": 40, "num_threads": 1, "max_model_len": 96, "dtype": "float32"}

    def compute(llm: LLM) -> torch.Tensor:
        return forced_logits(llm, TOKENS, num_prompt_tokens=38, chunk=20)

    with threads(1), ExitStack() as stack:
        right = compute(stack.enter_context(LLM(str(folder), device="cpu", use_tqdm=False, **given)))
        ranks = stack.enter_context(open_group(size, folder, **given))
        assert backend_of(ranks[0]).name == "torch"
        for logits in by_all(ranks, compute):
            torch.testing.assert_close(logits, right, rtol=0, atol=1e-4)
