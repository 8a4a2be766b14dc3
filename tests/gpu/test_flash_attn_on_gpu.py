"""flash-attn in half precision on an NVIDIA GPU, by the package or by torch's copy of it, against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from nanoengine.core.attention import AttentionSpec
from nanoengine.errors import InvalidConfig
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.kernels.capability import choose_backend
from tests.gpu.marks import needs_gpu
from tests.kernels.attention.contract import check_step
from tests.kernels.attention.every_backend import Kind
from tests.kernels.attention.paged import Heads, Pool, Sequences, assert_attended
from tests.kernels.formulas import DEVICE

pytestmark = needs_gpu

HALF = (torch.bfloat16, torch.float16)
LOOSER = 4
"""Times the error of one rounding: weights are rounded before they are multiplied by values."""
KIND = Kind("flash_attn", (256, 512), (32, 64, 128), 1500, 2_000_000, frozenset({"window"}), False, HALF, LOOSER)


def backend_of(block_size: int, name: str = "flash_attn") -> AttentionBackend:
    """A test is skipped with the reason that it cannot run here."""
    try:
        return choose_backend(name, DEVICE, torch.bfloat16, block_size, [64])[0]
    except InvalidConfig as error:
        pytest.skip(str(error))


def test_any_step_is_attention_by_its_definition() -> None:
    backend_of(256)
    with DEVICE:
        for seed in range(60):
            check_step(KIND, backend_of, seed)


@pytest.mark.parametrize("name", ["flash_attn", "triton"])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("heads", [Heads(8, 2, 128), Heads(4, 1, 64)], ids=str)
@pytest.mark.parametrize("most_new", [1, 3, 700])
def test_long_sequences_beside_short_ones(most_new: int, heads: Heads, window: int | None, name: str) -> None:
    """Decodes, decodes with drafts, and chunks: parts of sequences, if there are any, are put together in their own rows."""
    backend, lens = backend_of(256, name), [5000, 3, 2500, 4097, 1]
    starts = [max(0, n - most_new) for n in lens]
    with DEVICE:
        spec = AttentionSpec(heads.dim**-0.5, window)
        pool = Pool(Sequences(heads, 256, lens, torch.bfloat16), backend, norms=False, rotated=False, spec=spec)
        pool.fill(starts)
        out = pool.step(len(lens) if most_new < 4 else 0, starts, lens)
        assert_attended(out, pool.exact(starts, lens), LOOSER)
