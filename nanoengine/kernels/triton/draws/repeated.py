"""Draws of steps that follow each other: mostly the tensors lie where those of the step before lay."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from torch import Tensor

from nanoengine.core.sampling import SamplingTable
from nanoengine.kernels.triton.draws.sampling import choose_tokens, is_filtered
from nanoengine.kernels.triton.prepared import Again, Launches, current_stream

MOST_KEPT = 4
"""Draws in the cache, those of the latest steps: with filters, one of 256 rows holds 17 MB."""


class Draw(NamedTuple):
    """One that can be made again."""

    launches: list[Again]
    chosen: Tensor  # [n] int64, on the device: the tokens of each repetition
    tensors: tuple[object, ...]  # the table, and all tensors of the launches whose dtype and address are not in the key


class RepeatedDraws:
    """`choose_tokens`, with less work of the host where all tensors have the addresses and sizes of a draw not long ago.

    Tokens are good until the next draw: on a GPU, whatever reads them is launched before that. No graph may record a draw: its
    memory is kept for a few draws alone.
    """

    def __init__(self) -> None:
        self._draws: OrderedDict[tuple[object, ...], Draw] = OrderedDict()

    def choose(
        self, logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor, last: Tensor | None, launch: int
    ) -> Tensor:
        """As `choose_tokens`."""
        stream = current_stream(logits.device)
        key = (
            logits.data_ptr(),
            logits.shape,
            logits.stride(),
            logits.dtype,
            rows.data_ptr(),
            rows.dtype,
            positions.data_ptr(),
            positions.dtype,
            None if last is None else last.data_ptr(),
            id(table),
            is_filtered(table),
            launch,
            stream,
        )
        if (draw := self._draws.get(key)) is not None:
            self._draws.move_to_end(key)
            for again in draw.launches:
                again()
            return draw.chosen
        launches = Launches(stream, apart_from=(logits, rows, positions))
        chosen = choose_tokens(logits, table, rows, positions, last, launch, launches)
        if launches.again:
            self._draws[key] = Draw(launches.again, chosen, (table, *launches.memory))
            if len(self._draws) > MOST_KEPT:
                self._draws.popitem(last=False)
        return chosen
