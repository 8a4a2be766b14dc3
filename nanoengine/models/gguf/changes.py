"""Changes of numbers and shapes from tensors of a GGUF file to those of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Change(NamedTuple):
    """A conversion to Hugging Face's numbers: of a tensor, and of its shape alone.

    Shapes are computed apart from numbers: on the device "meta", arithmetic imports `torch._dynamo`, which takes a second.
    """

    numbers: Callable[[Tensor], Tensor]
    shape: Callable[[Sequence[int]], list[int]]


def _size(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape)]


ONE_LESS = Change(lambda numbers: numbers.float() - 1.0, list)
FILTERS = Change(lambda taps: taps.unsqueeze(1), lambda shape: [shape[0], 1, *shape[1:]])
"""[channels, taps] as convolutions of torch have it."""

LOG_RATE = Change(lambda rate: (-rate.float()).log().flatten(), _size)
"""llama.cpp has -exp of it, with a second dimension or without."""

FLAT = Change(lambda numbers: numbers.flatten(), _size)
ROW = Change(lambda numbers: numbers.view(1, -1), lambda shape: [1, math.prod(shape)])
