"""Several operations of a step of few rows in one kernel: what they are one after the other, interpreted to the bit."""

from __future__ import annotations

import random as standard
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.chain import Chain
from benchmarks.random_weights import SHAPES
from nanoengine.kernels.operations import Norm
from nanoengine.kernels.triton.attention.backend import TritonAttention
from nanoengine.kernels.triton.attention.rotate_and_write import rotate_and_write
from nanoengine.kernels.triton.products import gemv as gemv_module
from nanoengine.kernels.triton.products import mlp as mlp_module
from nanoengine.kernels.triton.products.fusion import Fusion
from nanoengine.kernels.triton.products.gemv import MOST_ROWS, gemv
from nanoengine.kernels.triton.products.heads import can_count_heads, heads_of_product
from nanoengine.kernels.triton.products.mlp import AHEAD, HELD, fitting_sizes, mlp_of_one_row
from nanoengine.kernels.triton.tuning import DEFAULTS
from nanoengine.kernels.triton.workspace import Workspace
from tests.kernels.formulas import DEVICE, random

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return random(*shape, dtype=dtype, seed=sum(shape)).to(DEVICE)


def assert_same(found: Tensor, right: Tensor) -> None:
    """A GPU may add up in another order."""
    tolerance = 0.0 if DEVICE.type == "cpu" else 1e-4 if found.dtype is torch.float32 else 0.02
    torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance * right.float().abs().max().item())


@pytest.mark.parametrize("seed", range(4))
def test_heads_of_a_product(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(gemv_module, "BYTES", 1200)
    rng, workspace, dtype = standard.Random(seed), Workspace(), DTYPES[seed % 3]
    kv_heads, dim, rows = rng.randint(1, 2), rng.choice((16, 64, 96, 128)), rng.randint(1, MOST_ROWS)
    inputs, outputs = rng.choice((64, 96)), (rng.randint(1, 3) + 2) * kv_heads * dim
    assert can_count_heads(inputs, outputs, dim, dtype.itemsize)
    norms = (numbers(dim), numbers(dim)) if rng.random() < 0.7 else (None, None)
    angles = [numbers(rows, 1, dim // 2)] * 2 if rng.random() < 0.7 else [None, None]
    changes = (*norms, 1e-6, angles[0], angles[1])
    slots = torch.tensor(rng.sample([-1, 5, 17, 40], rows), dtype=torch.int64, device=DEVICE)
    x, weight = (numbers(count, inputs, dtype=dtype) for count in (rows, outputs))
    bias, backend = numbers(outputs, dtype=dtype) if rng.random() < 0.5 else None, TritonAttention(16)
    fusion = Fusion(bias, Norm(numbers(inputs), 1e-6), numbers(rows, inputs, dtype=dtype))
    shape = backend.kv_shape(3, kv_heads, dim)
    ours, theirs = ([torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(2)] for _ in range(2))
    mine, their = (backend.cache((k, v)) for k, v in (ours, theirs))
    for _ in range(2):  # counters are left as they were
        q, total = heads_of_product(x, weight, fusion, workspace, changes, mine, slots)
    qkv, sums = gemv(x, weight, fusion)
    expected = rotate_and_write(qkv, changes, their, slots)
    for found, right in zip((q, total, *ours), (expected, sums, *theirs), strict=True):
        assert_same(found, right)
    assert any(cache.any() for cache in ours) or (slots < 0).all()


@pytest.mark.parametrize(("hidden", "size", "how"), [(64, 128, HELD), (100, 250, AHEAD), (256, 768, HELD)])
def test_an_mlp_of_one_row(monkeypatch: pytest.MonkeyPatch, hidden: int, size: int, how: int) -> None:
    monkeypatch.setattr(mlp_module, "num_multiprocessors", lambda *_: 40)
    x, residual = numbers(1, hidden, dtype=torch.bfloat16), numbers(1, hidden, dtype=torch.bfloat16) * 3
    gate_up, down = numbers(2 * size, hidden, dtype=torch.bfloat16), numbers(hidden, size, dtype=torch.bfloat16)
    sizes = fitting_sizes(hidden, size, 2, DEVICE, how)
    assert sizes is not None
    fusion = Fusion(norm=Norm(numbers(hidden), 1e-6), residual=residual, activation="gelu_tanh")
    workspace = Workspace()
    for _ in range(2):  # a launch leaves to the next one what that needs
        out, total = mlp_of_one_row(x, gate_up, down, fusion, workspace, sizes, how)
    gates, sums = gemv(x, gate_up, fusion)
    assert_same(out, gemv(gates, down, Fusion())[0])
    assert_same(total, sums)


def test_programs_have_room_side_by_side() -> None:
    """Those of a model of 1,024 dimensions, by 132 multiprocessors; larger models have two launches."""
    assert fitting_sizes(1024, 3072, 2, torch.device("cpu"), HELD) is not None
    assert fitting_sizes(1024, 3072, 2, torch.device("cpu"), AHEAD) is not None
    assert fitting_sizes(2560, 9728, 2, torch.device("cpu"), HELD) is None
    assert fitting_sizes(2560, 9728, 2, torch.device("cpu"), AHEAD) is None


@pytest.mark.skipif(DEVICE.type == "cuda", reason="benchmarks/gpu/choose.py compares them there, in real sizes")
def test_a_model_computes_the_same_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name, kernel in (("heads_of_product", heads_of_product), ("mlp_of_one_row", mlp_of_one_row)):

        def noted(*given: object, kernel=kernel, name: str = name, **asked: object) -> object:  # type: ignore[no-untyped-def]
            calls.append(name)
            return kernel(*given, **asked)

        monkeypatch.setattr(f"nanoengine.kernels.triton.operations.{name}", noted)
    monkeypatch.setattr(gemv_module, "BYTES", 1200)
    few = {"vocab_size": 32, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    monkeypatch.setitem(SHAPES, "tiny", SHAPES["tiny"] | few)
    chain = Chain("tiny", DEVICE, torch.bfloat16, 40)
    step = chain.inputs([20])
    with torch.inference_mode():
        logits, written = chain.run(step).clone(), chain.written(step)
        chain.tune(replace(DEFAULTS, heads_in_product=1, weights_ahead=2, fused_mlp=1))
        assert torch.equal(chain.run(step), logits)
        assert torch.equal(chain.written(step), written)
        assert calls == ["heads_of_product", "mlp_of_one_row"] * 2
        chain.kernels.can_fuse = False
        assert torch.equal(chain.run(step), logits)
        assert len(calls) == 4, "adapters change what each product returns"
