"""What a recording of calls on a CPU does again, and what it refuses to record."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoengine.kernels.native.c_functions import c_functions, recorded_calls
from nanoengine.kernels.native.operations import NativeKernels
from nanoengine.kernels.operations import Norm, Weight
from nanoengine.kernels.recording.cpu_recorder import CannotRecord, CpuRecorder
from tests.kernels.formulas import random, weight_of
from tests.kernels.marks import needs_kernels

pytestmark = needs_kernels
GIVEN = torch.tensor([1.0, 2.0, 3.0, 4.0])


def chain(x: Tensor) -> Tensor:
    """Functions of every kind: with new results, views, in place, into a place."""
    first, second = (x * 2).view(2, 2).unbind()
    total = torch.empty(2)
    torch.add(first, second, out=total)
    total += first.long()
    total[0] = second[1]
    return torch.where(total > 5, total, -total).contiguous().flatten()


def test_a_replay_does_what_the_work_would_do_with_the_numbers_that_are_there_now() -> None:
    place = torch.zeros(4)
    replay = CpuRecorder().record(lambda: chain(place))
    for factor in (1.0, -3.0, 0.5):
        place.copy_(GIVEN * factor)
        assert torch.equal(replay(), chain(place))
    assert replay().data_ptr() == replay().data_ptr()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_that_are_looked_up_are_native_calls(dtype: torch.dtype) -> None:
    """Of angles, and of block tables, of which a step reads the first columns."""
    angles, index = torch.rand(9, 2, 4), torch.zeros(3, dtype=dtype)
    wide = torch.arange(2 * 9 * 7, dtype=torch.int32).view(2, 9, 7)

    def lookups() -> Tensor:
        blocks = wide[:, :, :5].index_select(1, index)
        return torch.cat((angles.index_select(0, index).flatten(), blocks.flatten()))

    replay = CpuRecorder().record(lookups)
    assert isinstance(replay, partial)
    assert [call.func.__name__ for call in replay.args[0]] == ["_run_native", "_do_again"]
    for rows in ([0, 0, 0], [8, 3, 1], [2, 2, 7]):
        index.copy_(torch.tensor(rows))
        assert torch.equal(replay(), lookups())


def test_rows_that_do_not_lie_in_one_piece_are_looked_up_by_torch() -> None:
    columns, index = torch.rand(4, 9).T, torch.tensor([2, 0])
    replay = CpuRecorder().record(lambda: columns.index_select(0, index))
    index.copy_(torch.tensor([8, 5]))
    assert torch.equal(replay(), columns[[8, 5]])


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, bool, int, Tensor.numpy], ids=repr)
def test_a_number_that_is_read_cannot_be_recorded(read: Callable[[Tensor], object]) -> None:
    def work() -> Tensor:
        read(torch.ones(1).sum())
        return GIVEN

    with pytest.raises(CannotRecord, match="cannot be recorded"):
        CpuRecorder().record(work)


@pytest.mark.parametrize(
    "part",
    [
        lambda x, place: x[place],
        lambda x, place: x[:place],
        lambda x, place: x[None, place:],
        lambda x, place: x[x > place],
        lambda x, place: x.gt(place).nonzero(),
        lambda x, place: torch.where(x > place)[0],
    ],
)
def test_a_part_at_numbers_in_a_tensor_cannot_be_recorded(part: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(CannotRecord, match="cannot be recorded"):
        CpuRecorder().record(lambda: part(GIVEN, torch.tensor(2)))


def floats(*shape: int, seed: int = 0) -> Tensor:
    return random(*shape, dtype=torch.float32, seed=seed)


def layers(kernels: NativeKernels, weight: Weight, x: Tensor, residual: Tensor) -> Tensor:
    """Native calls, and one of torch between them."""
    norm = torch.ones(x.shape[1])
    for _ in range(3):
        x, residual = kernels.product(x, weight, norm=Norm(norm, 1e-5), residual=residual)
    x = kernels.linear(x * 2, weight, None)
    return kernels.logits(kernels.gate(torch.cat((x, x), 1), "silu"), weight)


def test_native_calls_that_follow_one_another_are_one_call() -> None:
    kernels, x, residual = NativeKernels(), floats(3, 64), floats(3, 64, seed=1)
    weight = weight_of(kernels, floats(64, 64, seed=2))
    replay = CpuRecorder().record(lambda: layers(kernels, weight, x, residual))
    assert isinstance(replay, partial)
    assert [call.func.__name__ for call in replay.args[0]] == [
        "_do_again",  # of ones
        "_run_native",
        "_do_again",  # of a product with 2
        "_run_native",
        "_do_again",  # of a concatenation
        "_run_native",
    ]
    for seed in range(3):
        given = floats(3, 64, seed=seed), floats(3, 64, seed=seed + 5)
        expected = layers(kernels, weight, given[0], given[1].clone())
        x.copy_(given[0])
        residual.copy_(given[1])
        assert torch.equal(replay(), expected)


def test_a_call_that_is_not_for_steps_is_refused() -> None:
    def work() -> Tensor:
        c_functions().panels_size(32, 32, 32)
        return GIVEN

    with pytest.raises(CannotRecord, match="panels_size"):
        CpuRecorder().record(work)


def test_calls_are_reported_while_they_are_recorded_and_not_after() -> None:
    reported: list[tuple[str, tuple[Any, ...]]] = []
    with recorded_calls(lambda *call: reported.append(call)):
        c_functions().panels_size(32, 32, 32)
    c_functions().panels_size(32, 32, 32)
    assert reported == [("panels_size", (32, 32, 32))]
