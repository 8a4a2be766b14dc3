"""What the native operations tell torch of themselves, and that it is true. What they compute is tested where they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanoengine.kernels.native_operations import operation, operations, unsupported_reason
from nanoengine.kernels.native_weights import NativeExperts, NativeWeight
from tests.support import angles_at

CPU = torch.device("cpu")
REASON = unsupported_reason(CPU, torch.float32)
needs_kernels = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")

HEADS, DIM = 2, 32


def declared(name: str) -> str:
    operations()
    return str(getattr(torch.ops.nanoengine, name).default._schema).removeprefix("nanoengine::")


@needs_kernels
@pytest.mark.parametrize(
    ("name", "schema"),
    [
        (
            "linear",
            "(Tensor x, Tensor(a1!)? residual, Tensor? norm, float eps, Tensor packed, Tensor? bias, int outputs, "
            "bool to_float) -> Tensor",
        ),
        (
            "experts",
            "(Tensor x, Tensor gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, "
            "Tensor chosen, Tensor factors, int count, int size, int activation) -> Tensor",
        ),
        (
            "quantized_linear",
            "(Tensor x, Tensor(a1!)? residual, Tensor? norm, float eps, Tensor table, Tensor? bias, int outputs, "
            "bool to_float, bool exact) -> Tensor",
        ),
        (
            "quantized_gated_linear",
            "(Tensor x, Tensor(a1!)? residual, Tensor? norm, float eps, Tensor table, int size, int activation, "
            "bool exact) -> Tensor",
        ),
        ("embed", "(Tensor token_ids, Tensor packed, int inputs, ScalarType dtype) -> Tensor"),
        ("rms_norm", "(Tensor x, Tensor(a1!)? residual, Tensor weight, float eps) -> Tensor"),
        (
            "attention_write",
            "(Tensor k, Tensor v, Tensor(a2!) k_cache, Tensor(a3!) v_cache, Tensor slots, int block_size) -> ()",
        ),
    ],
)
def test_schemas_are_the_type_hints_and_what_is_overwritten(name: str, schema: str) -> None:
    assert declared(name) == name + schema


@needs_kernels
def test_operations_overwrite_what_they_say_and_nothing_else() -> None:
    """Torch's own check of a schema against what a call does."""
    operations()
    ops, k, v = torch.ops.nanoengine, *torch.randn(2, 3, HEADS, DIM)
    caches = torch.zeros(2, 4, 1, HEADS, 16 * DIM)
    slots, weight = torch.tensor([5, -1, 40]), torch.rand(DIM)
    cos, sin = angles_at(torch.arange(3), DIM, 1e4)
    qkv, tables = torch.randn(3, 4 * HEADS * DIM), torch.tensor([[1, 2]] * 3, dtype=torch.int32)
    q, lens = torch.randn(3, 2 * HEADS, DIM), torch.tensor([1, 5, 20], dtype=torch.int32)
    starts, sizes = torch.tensor([0, 1, 2, 3], dtype=torch.int32), (HEADS, DIM, 16)
    packed = NativeWeight(64, 8, torch.float32).numbers
    experts = [NativeExperts(2, 8, 8, torch.float32).weight.numbers for _ in range(3)]
    choices = torch.tensor([[1, 0]] * 3), torch.rand(3, 2)
    calls = [
        (ops.rms_norm, (torch.randn(3, 8), None, torch.rand(8), 1e-6)),
        (ops.rms_norm, (torch.randn(3, 8), torch.randn(3, 8), torch.rand(8), 1e-6)),
        (ops.linear, (torch.randn(3, 8), torch.randn(3, 8), torch.rand(8), 1e-6, packed, None, 5, False)),
        (ops.linear, (torch.randn(3, 8), None, None, 0.0, packed, torch.rand(5), 5, True)),
        (ops.gated_linear, (torch.randn(3, 8), torch.randn(3, 8), torch.rand(8), 1e-6, packed, 32, 0)),
        (ops.experts, (torch.randn(3, 8), *experts, None, None, None, *choices, 2, 8, 0)),
        (ops.draw_tokens, (torch.randn(2, 50), torch.tensor([3, 4]), torch.tensor([0.0, 1.0]))),
        (ops.attention_rotate_and_write, (qkv, weight, weight, 1e-6, cos, sin, *caches, slots, *sizes)),
        (ops.attention_rotate_and_write, (qkv, None, None, 0.0, None, None, *caches, slots, *sizes)),
        (ops.attention_write, (k, v, *caches, slots, 16)),
        (ops.attention_decode, (q, *caches, tables, starts, lens, 0, HEADS, 16, 0.2, None, None, None)),
        (ops.attention_prefill, (q, *caches, tables, starts, lens, HEADS, 16, 0.2, 30.0, 8, torch.zeros(2 * HEADS))),
    ]
    for called, arguments in calls:
        torch.library.opcheck(called.default, arguments, test_utils="test_schema")


@needs_kernels
@pytest.mark.parametrize("wrong", [torch.ones(16, dtype=torch.bfloat16), torch.ones(32)[::2]], ids=["bfloat16", "gaps"])
def test_what_c_reads_as_floats_must_be_floats_in_one_piece(wrong: Tensor) -> None:
    """Norms, sinks, and biases of experts: as bare addresses they would be read as what they are not."""
    x, heads = torch.randn(1, 16), torch.randn(1, 16, DIM)
    experts = [NativeExperts(1, 16, 16, torch.float32).weight.numbers for _ in range(3)]
    choices = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    caches, one = torch.zeros(2, 2, 1, 16, 16 * DIM), torch.ones(1, dtype=torch.int32)
    starts, asked = torch.tensor([0, 1], dtype=torch.int32), (16, 16, 0.2, None, None)
    calls: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
        "rms_norm": lambda floats: (x, None, floats, 1e-6),
        "experts": lambda floats: (x, *experts, None, None, floats[None], *choices, 1, 16, 0),
        "attention_decode": lambda floats: (heads, *caches, one[None], starts, one, 0, *asked, floats),
        "attention_prefill": lambda floats: (heads, *caches, one[None], starts, one, *asked, floats),
    }
    for name, arguments in calls.items():
        operation(name)(*arguments(torch.ones(16)))
        with pytest.raises(AssertionError):
            operation(name)(*arguments(wrong))


@needs_kernels
def test_an_operation_goes_by_way_of_torch_only_while_its_profiler_looks() -> None:
    rms_norm = operation("rms_norm")
    x, weight = torch.randn(3, 32), torch.rand(32)
    with torch.profiler.profile() as profile:
        seen = rms_norm(x, None, weight, 1e-6)
    assert "nanoengine::rms_norm" in {event.key for event in profile.key_averages()}
    assert torch.equal(seen, rms_norm(x, None, weight, 1e-6))
    dispatched: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            dispatched.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        rms_norm(x, None, weight, 1e-6)
    assert not [name for name in dispatched if "nanoengine" in name]
