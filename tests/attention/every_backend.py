"""Every attention backend that runs on this machine; packages are stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanoengine.attention import flash_attn
from nanoengine.attention.backend import AttentionBackend, choose_backend
from nanoengine.errors import InvalidConfig
from tests.attention.stand_ins import PACKAGES, installed
from tests.support import TOY

CPU = torch.device("cpu")

BLOCK_SIZES = {"torch": 16, "native": 16, "triton": 16, "flash_attn_2": 256, "flash_attn_3": 16}
"""What each is tested with."""

every_backend = pytest.mark.parametrize("name", BLOCK_SIZES)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@contextmanager
def running(name: str, head_dim: int, dtype: torch.dtype, *, quick: bool = False) -> Iterator[AttentionBackend]:
    """A backend by the name of its package. A test is skipped with the reason that one cannot run here.

    Args:
        quick: let torch write K/V wherever Triton would: its interpreter takes its time for every token.
    """
    model, block_size = replace(TOY, head_dim=head_dim), BLOCK_SIZES[name]
    with pytest.MonkeyPatch.context() as patch:
        if quick:
            patch.setattr(flash_attn, "triton_unsupported_reason", lambda _: "it is slow")
        if name not in PACKAGES:
            try:
                backend = choose_backend(name, CPU, dtype, model, block_size)[0]
            except InvalidConfig as error:
                pytest.skip(str(error))
            if quick and name == "triton":
                patch.setattr(backend, "rotate_and_write", None)
                patch.setattr(backend, "write_kv", write_in_torch)
            yield backend
            return
        with installed(name, exact=True):
            yield choose_backend(name.removesuffix("_2").removesuffix("_3"), CPU, dtype, model, block_size)[0]


def write_in_torch(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """`TritonAttention.write_kv`."""
    there = slot_mapping >= 0
    slots, block_size = slot_mapping[there], k_cache.shape[2]
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[slots // block_size, :, slots % block_size] = new[there]
