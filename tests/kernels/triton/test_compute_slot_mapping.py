"""Where tokens stand, against a loop in Python."""

from __future__ import annotations

import os
import random
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanoengine.kernels.triton.compute_slot_mapping import TILE, compute_slot_mapping

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Step:
    """Random sequences, and what the kernel has to make of them.

    Args:
        query_lens: tokens of each sequence.
        padding: which sequences are in the padding row.
    """

    def __init__(
        self,
        query_lens: list[int],
        *,
        padding: tuple[int, ...] = (),
        block_size: int = 16,
        num_groups: int = 1,
        num_rows: int = 9,
        seed: int = 0,
    ):
        rng = random.Random(seed)
        self.block_size, self.max_query_len = block_size, max(query_lens, default=0)
        self.rows = rng.sample(range(num_rows - 1), len(query_lens))
        for i in padding:
            self.rows[i] = num_rows - 1
        self.starts = [0, *accumulate(query_lens)]
        self.computed = [rng.randint(0, 100) for _ in query_lens]
        self.token_ids = [rng.choice([-1, rng.randint(0, 150_000)]) for _ in range(self.starts[-1])]
        self.last_tokens = [rng.randint(0, 150_000) for _ in range(num_rows)]
        width = -(-(100 + self.max_query_len) // block_size) + 1
        self.tables = [
            [[rng.randint(0, 1 << 27) for _ in range(width)] for _ in range(num_rows)] for _ in range(num_groups)
        ]
        self.gap = rng.randint(0, 3)

    def run(self) -> dict[str, list[Any]]:
        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        tables = F.pad(torch.tensor(self.tables, dtype=torch.int32), (0, self.gap), value=1 << 28)
        result = compute_slot_mapping(
            int32(self.token_ids),
            int32(self.rows),
            int32(self.starts),
            int32(self.computed),
            torch.tensor(self.last_tokens, dtype=torch.int64, device=DEVICE),
            tables.to(DEVICE)[:, :, : tables.shape[2] - self.gap],
            self.block_size,
            self.max_query_len,
        )
        assert all(slots.data_ptr() % 16 == 0 for slots in result.slot_mapping), "other kernels take it for granted"
        names = ("input_ids", "positions", "slot_mapping", "seq_lens")
        return {name: values.tolist() for name, values in zip(names, result, strict=True)}

    def expected(self) -> dict[str, list[Any]]:
        slot_mapping: list[list[int]] = [[] for _ in self.tables]
        result: dict[str, list[Any]] = {"input_ids": [], "positions": [], "slot_mapping": slot_mapping, "seq_lens": []}
        for i, row in enumerate(self.rows):
            start, end = self.starts[i : i + 2]
            real = row != len(self.last_tokens) - 1
            result["seq_lens"].append(self.computed[i] + end - start if real else 0)
            for token in range(start, end):
                position = self.computed[i] + token - start
                given = self.token_ids[token]
                result["input_ids"].append((self.last_tokens[row] if given < 0 else given) if real else 0)
                result["positions"].append(position if real else 0)
                for table, slots in zip(self.tables, slot_mapping, strict=True):
                    block = table[row][position // self.block_size]
                    slots.append(block * self.block_size + position % self.block_size if real else -1)
        return result


@settings(deadline=None, max_examples=40)
@given(
    query_lens=st.lists(st.integers(0, 40), max_size=6),
    padding=st.sets(st.integers(0, 5)),
    block_size=st.sampled_from([16, 64, 256]),
    num_groups=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_it_is_the_loop(query_lens: list[int], padding: set[int], block_size: int, num_groups: int, seed: int) -> None:
    in_padding = tuple(i for i in padding if i < len(query_lens))
    step = Step(query_lens, padding=in_padding, block_size=block_size, num_groups=num_groups, seed=seed)
    assert step.run() == step.expected()


@pytest.mark.parametrize("longest", [TILE - 1, TILE, TILE + 1, 2 * TILE + 5])
def test_prompts_longer_than_a_tile(longest: int) -> None:
    step = Step([1, longest, 3], num_groups=2)
    assert step.run() == step.expected()


def test_decodes_with_padding_behind() -> None:
    step = Step([1] * 8, padding=(5, 6, 7), num_groups=3, num_rows=17)
    result = step.run()
    assert result == step.expected()
    assert [slots[5:] for slots in result["slot_mapping"]] == [[-1] * 3] * 3
    assert result["seq_lens"][5:] == [0] * 3


def test_a_row_without_a_token_is_given_one_that_there_is() -> None:
    step = Step([1])
    step.token_ids, step.last_tokens = [-1], [-1] * 9
    assert step.run()["input_ids"] == [0]
