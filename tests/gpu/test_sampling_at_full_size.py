"""Sampling of a full batch over a real vocabulary, with all filters and ties: against a sort in float64, and torch's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux on x86-64 alone")

from nanoengine.core.sampling import gumbel_noise, position_keys
from tests.gpu.marks import needs_gpu
from tests.kernels.triton.sampled_rows import DEVICE, Rows, kept_exactly, random_logits, signed

AGREEING = 0.97
"""Share of rows in which torch's kernels must draw the same token: in the others rounding has decided at a limit."""

SIZES = [pytest.param(6, 1500, id="small"), pytest.param(256, 151_936, marks=needs_gpu, id="256 x 151,936")]


def rows_of_every_kind(count: int, vocab_size: int) -> Rows:
    temperatures, top_ps, min_ps = (0.6, 1.0, 0.0, 1.5), (1.0, 0.95, 0.5, 0.999), (0.0, 0.0, 0.02)
    top_ks = (0, 20, 1, 1000, vocab_size // 3)
    rows: list[dict[str, Any]] = [
        {
            "temperature": temperatures[i % 4],
            "top_k": top_ks[i % 5],
            "top_p": top_ps[i // 4 % 4],
            "min_p": min_ps[i % 3],
        }
        for i in range(count)
    ]
    return Rows(rows, seed=1)


@pytest.mark.parametrize("kind", ["random", "ties", "peaked", "banned"])
@pytest.mark.parametrize(("count", "vocab_size"), SIZES)
def test_a_full_batch(count: int, vocab_size: int, kind: str) -> None:
    rows, logits = rows_of_every_kind(count, vocab_size), random_logits(kind, count, vocab_size, seed=3)
    kept, tokens, others = rows.kept(logits), rows.choose(logits), rows.expected(logits)
    seeds = torch.tensor([signed(seed) for seed in rows.seeds], device=DEVICE)
    keys = position_keys(seeds, torch.tensor(rows.positions, device=DEVICE))
    ids = torch.arange(vocab_size, device=DEVICE)[None]
    for i, params in enumerate(rows.params):
        if params.temperature == 0:
            assert tokens[i] == int((logits[i] == logits[i].max()).nonzero()[0]), "the lowest id of the highest"
            continue
        exact, close = kept_exactly(logits[i], params)
        assert not ((kept[i] ^ exact) & ~close).any(), params
        scores = logits[i] / params.temperature + gumbel_noise(keys[i : i + 1], ids)[0]
        scores = scores.masked_fill(~kept[i], -torch.inf)
        assert kept[i, tokens[i]], params
        assert scores[tokens[i]] >= scores.max() - 4e-6 * scores.max().abs().clamp(min=1), params
    agreeing = sum(mine == other for mine, other in zip(tokens, others, strict=True))
    assert agreeing >= AGREEING * count
