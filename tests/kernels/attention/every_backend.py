"""Every attention backend that runs on this machine; packages are stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from nanoengine.core.attention import KVLayer
from nanoengine.errors import InvalidConfig
from nanoengine.kernels import flash_attn
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.kernels.capability import choose_backend
from nanoengine.kernels.reference.kv_int8 import quantize
from tests.kernels.attention.stand_ins import PACKAGES, installed
from tests.kernels.formulas import DEVICE

CPU = torch.device("cpu")

BackendOf = Callable[[int], AttentionBackend]
"""Tokens in a block -> a backend."""


@dataclass(frozen=True)
class Kind:
    """What steps are drawn for a backend.

    Attributes:
        longest: most tokens of a sequence.
        work: most tokens of all sequences, times all that is projected of each; it bounds the time of a step.
        looser: so many times the error that is allowed in bfloat16: Triton's interpreter cuts off what it should round.
    """

    name: str
    block_sizes: tuple[int, ...]
    head_dims: tuple[int, ...]
    longest: int
    work: int
    features: frozenset[str] = frozenset({"window", "chunked", "sinks", "soft_cap"})
    quantizes: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float32, torch.bfloat16)
    looser: int = 1


NATIVE = Kind("native", (16, 32, 48, 64, 256), (32, 64, 96, 128, 160, 256, 512), 1100, 600_000)
TRITON = Kind(
    "triton", (16, 32), (16, 32, 48), 70, 30_000, dtypes=(torch.float32, torch.float16, torch.bfloat16), looser=4
)
KINDS = (
    Kind("torch", (1, 4, 16), (2, 8, 32), 90, 60_000),
    NATIVE,
    TRITON,
    *(Kind(package, (256,), (8, 24, 32), 560, 120_000, frozenset({"window"}), False) for package in PACKAGES),
)
every_backend = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@contextmanager
def running(kind: Kind, *, quick: bool = True) -> Iterator[BackendOf]:
    """A backend by the name of its package. A test is skipped with the reason that one cannot run here.

    Args:
        quick: let torch write K/V wherever Triton would: its interpreter takes its time for every token.
    """
    with pytest.MonkeyPatch.context() as patch:
        if quick:
            patch.setattr(flash_attn, "triton_unsupported_reason", lambda _: "it is slow")
        if kind.name in PACKAGES:
            with installed(kind.name, exact=True):
                yield lambda block_size: flash_attn.FlashAttention(block_size)
            return
        device = DEVICE if kind.name == "triton" else CPU

        def backend_of(block_size: int) -> AttentionBackend:
            head_dims = kind.head_dims[:1]  # others are as good
            try:
                backend = choose_backend(kind.name, device, torch.float32, block_size, head_dims)[0]
            except InvalidConfig as error:
                pytest.skip(str(error))
            return written_in_torch(backend) if quick and kind.name == "triton" else backend

        with device:
            yield backend_of


def written_in_torch(backend: AttentionBackend) -> AttentionBackend:
    """Triton's backend, whose caches are written without Triton."""
    backend.rotate_and_write = None
    backend.write_kv = partial(write_in_torch, backend.block_size)  # type: ignore[method-assign]
    return backend


def write_in_torch(block_size: int, k: Tensor, v: Tensor, kv: KVLayer, slot_mapping: Tensor) -> None:
    """`TritonAttention.write_kv`."""
    from nanoengine.kernels.triton.attention.kv_int8 import views

    there = slot_mapping >= 0
    for cache, new in zip(kv, (k, v), strict=True):
        numbers, scales = cache.transpose(1, 2), None
        if cache.dtype is torch.int8:
            (numbers, scales), (new, of_new) = views(cache, block_size), quantize(new)
        at = slot_mapping[there] // block_size, slot_mapping[there] % block_size
        numbers[at] = new[there]
        if scales is not None:
            scales[at] = of_new[there]
