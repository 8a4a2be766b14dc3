"""Norms, rotation and the write to the cache in one kernel, against the layers in torch one after the other."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanoengine.kernels.triton.rotate_and_write import rotate_and_write
from tests.support import angles_at

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-6
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Largest error of a value of size 1 or more, relative to it."""


class Case:
    """Random projections, norms, angles and slots; what is exact; and two caches of NaN."""

    def __init__(
        self,
        num_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        gap: int = 0,
        normed: bool = True,
        rotated: bool = True,
    ):
        generator = torch.Generator().manual_seed(seed)
        width = (num_heads + 2 * num_kv_heads) * head_dim
        self.heads = (num_heads, num_kv_heads, num_kv_heads)
        self.normed, self.rotated = normed, rotated
        self.head_dim, self.block_size = head_dim, block_size
        self.qkv = torch.randn(num_tokens, width + gap, generator=generator).to(dtype).to(DEVICE)[:, :width]
        self.norms = [(torch.rand(head_dim, generator=generator) + 0.5).to(DEVICE) for _ in range(2)]
        positions = torch.randint(0, 3000, (num_tokens,), generator=generator)
        angles = angles_at(positions, head_dim, 10_000.0)
        self.angles = [angle.to(DEVICE) for angle in angles]
        self.num_blocks = num_tokens // block_size + 3
        self.slots = torch.randperm(self.num_blocks * block_size, generator=generator)[:num_tokens].to(DEVICE)

    def caches(self) -> list[Tensor]:
        """As layers have them that share blocks: heads before slots, K beside V, and another layer between."""
        shape = (self.num_blocks, 2, 2, self.heads[1], self.block_size, self.head_dim)
        memory = torch.full(shape, torch.nan, dtype=self.qkv.dtype, device=DEVICE)
        return [memory[:, 1, i].transpose(1, 2) for i in range(2)]

    def run(self, caches: list[Tensor]) -> Tensor:
        weights = self.norms if self.normed else (None, None)
        angles = self.angles if self.rotated else (None, None)
        return rotate_and_write(self.qkv, *weights, EPS, *angles, *caches, self.slots)

    def exact(self) -> list[Tensor]:
        q, k, v = self.qkv.double().unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=1)
        return [self._rotated(q, self.norms[0]), self._rotated(k, self.norms[1]), v]

    def _rotated(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.normed:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        if not self.rotated:
            return x
        cos, sin = (angle.double() for angle in self.angles)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def check(self) -> None:
        caches = self.caches()
        exact_q, *exact_kv = self.exact()
        q = self.run(caches)
        assert q.shape == exact_q.shape
        assert q.is_contiguous()
        assert_near(q, exact_q)
        written = self.slots[self.slots >= 0]
        for cache, expected in zip(caches, exact_kv, strict=True):
            slots = cache.reshape(-1, *cache.shape[2:])
            assert_near(slots[written], expected[self.slots >= 0])
            untouched = torch.ones(len(slots), dtype=torch.bool, device=DEVICE)
            untouched[written] = False
            assert slots[untouched].isnan().all()


def assert_near(result: Tensor, exact: Tensor) -> None:
    tolerance = TOLERANCE[result.dtype]
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


@settings(deadline=None, max_examples=25)
@given(
    num_tokens=st.integers(1, 6),
    num_kv_heads=st.integers(1, 5),
    group=st.integers(1, 7),
    head_dim=st.sampled_from([16, 32, 64, 128, 256]),
    block_size=st.sampled_from([16, 32, 256]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
    gap=st.integers(0, 9),
    nowhere=st.booleans(),
)
def test_it_is_the_norms_the_rotation_and_the_write(
    num_tokens: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int,
    gap: int,
    nowhere: bool,
) -> None:
    heads = (num_kv_heads * group, num_kv_heads, head_dim)
    case = Case(num_tokens, *heads, block_size=block_size, dtype=dtype, seed=seed, gap=gap)
    if nowhere:
        case.slots[::2] = -1
    case.check()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(16, 8), (64, 8), (40, 8), (4, 1), (9, 3)])
def test_heads_in_several_groups(num_heads: int, num_kv_heads: int) -> None:
    Case(3, num_heads, num_kv_heads, 128, dtype=torch.bfloat16).check()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("normed", "rotated"), [(False, True), (True, False), (False, False)])
def test_without_norms_or_rotation(normed: bool, rotated: bool, dtype: torch.dtype) -> None:
    Case(5, 6, 2, 64, dtype=dtype, gap=3, normed=normed, rotated=rotated).check()


def test_v_is_copied_bit_by_bit() -> None:
    case = Case(5, 4, 2, 64, dtype=torch.bfloat16)
    caches = case.caches()
    case.run(caches)
    written = caches[1].reshape(-1, 2, 64)[case.slots]
    assert torch.equal(written, case.qkv.unflatten(-1, (-1, 64))[:, 6:])


def test_no_tokens() -> None:
    case = Case(0, 4, 2, 64)
    caches = case.caches()
    assert case.run(caches).shape == (0, 4, 64)
    assert all(cache.isnan().all() for cache in caches)


def test_nothing_is_written_where_every_slot_is_minus_one() -> None:
    case = Case(4, 4, 2, 32)
    case.slots.fill_(-1)
    caches = case.caches()
    q = case.run(caches)
    assert_near(q, case.exact()[0])
    assert all(cache.isnan().all() for cache in caches)


def test_a_head_of_zeros_stays_zero() -> None:
    case = Case(2, 2, 1, 32)
    case.qkv.zero_()
    caches = case.caches()
    assert (case.run(caches) == 0).all()
    assert (caches[0].reshape(-1, 1, 32)[case.slots] == 0).all()
