"""What a recording of calls on a CPU does again, and what it refuses to record."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nanoengine.kernels.c_functions import c_functions, recorded_calls
from nanoengine.recording.cpu_recorder import CannotRecord, CpuRecorder
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


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, bool, int, Tensor.numpy], ids=repr)
def test_a_number_that_is_read_cannot_be_recorded(read: Callable[[Tensor], object]) -> None:
    def work() -> Tensor:
        read(torch.ones(1).sum())
        return GIVEN

    with pytest.raises(CannotRecord, match="cannot be recorded"):
        CpuRecorder().record(work)


def test_calls_are_reported_while_they_are_recorded_and_not_after() -> None:
    reported: list[object] = []
    with recorded_calls(reported.append):
        c_functions().panels_size(32, 32, 32)
    c_functions().panels_size(32, 32, 32)
    assert len(reported) == 1
