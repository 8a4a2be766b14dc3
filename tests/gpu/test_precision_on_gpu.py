"""Half precision on an NVIDIA GPU, with every attention backend that runs there: about as exact as torch's own operations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanoengine import LLM
from nanoengine.core.model_config import read_json
from nanoengine.errors import InvalidConfig
from nanoengine.kernels.capability import choose_backend
from nanoengine.models.architectures import read_model_config
from tests.gpu.engines import DEVICE, VOCAB_SIZE, open_llm
from tests.gpu.marks import needs_gpu
from tests.support import forced_logits, reference_logits, reference_model

pytestmark = needs_gpu

LENGTH = 300
BLOCK_SIZES = {"triton": 16, "flash_attn": 256}
WORSE = 1.5
"""Times the error of plain torch operations in the same dtype, which rounds more often."""


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    ids: list[int] = torch.randint(0, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
    return ids


@pytest.fixture(scope="module")
def exact(checkpoint: Path, token_ids: list[int]) -> torch.Tensor:
    return reference_logits(reference_model(checkpoint), token_ids)


def skip_unless_it_runs(checkpoint: Path, backend: str, dtype: str) -> None:
    """For the backend's own reason, before any engine is opened."""
    config = read_model_config(read_json(checkpoint, "config.json"))
    try:
        choose_backend(backend, torch.device(DEVICE), getattr(torch, dtype), config, BLOCK_SIZES[backend])
    except InvalidConfig as error:
        pytest.skip(str(error))


def open_half(checkpoint: Path, backend: str, dtype: str) -> LLM:
    size = BLOCK_SIZES.get(backend, 16)
    kernels = "torch" if backend == "torch" else "triton"
    options = {"attention_backend": backend, "kernels": kernels, "block_size": size, "max_model_len": 512}
    return open_llm(checkpoint, dtype=dtype, num_kv_blocks=6400 // size, **options)


def error_of(llm: LLM, token_ids: list[int], exact: torch.Tensor) -> float:
    """Root mean square over all logits."""
    logits = forced_logits(llm, token_ids, num_prompt_tokens=200, chunk=90).cpu()
    assert logits.isfinite().all()
    return (logits.double() - exact).square().mean().sqrt().item()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", BLOCK_SIZES)
def test_logits_are_as_exact_as_those_of_torch(
    checkpoint: Path, token_ids: list[int], exact: torch.Tensor, backend: str, dtype: str
) -> None:
    skip_unless_it_runs(checkpoint, backend, dtype)
    with open_half(checkpoint, "torch", dtype) as llm:
        allowed = WORSE * error_of(llm, token_ids, exact)
    with open_half(checkpoint, backend, dtype) as llm:
        llm_error = error_of(llm, token_ids, exact)
    assert 0 < llm_error <= allowed, f"{llm_error / allowed * WORSE:.2f} times the error of torch"
