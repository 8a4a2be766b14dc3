"""A prompt without history, alone in its step, is computed from K and V beside its queries; everything else as before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from nanoengine.kernels.triton.attention import backend as module
from nanoengine.kernels.triton.attention.backend import TritonAttention
from nanoengine.kernels.triton.tuning import DEFAULTS
from tests.kernels.attention.every_backend import DEVICE
from tests.kernels.attention.paged import PLAIN, Heads, Pool, Sequences, assert_attended
from tests.kernels.noting import noting

SCALED = replace(PLAIN, scale=0.3)
WHOLE = "_whole_prompt_kernel"


@pytest.fixture(autouse=True)
def everything_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "SHORTEST_WHOLE", 1)
    with DEVICE:
        yield


def pool_of(heads: Heads, lens: list[int], *, tile: int = 64, **asked: Any) -> Pool:
    backend = TritonAttention(16, replace(DEFAULTS, whole_prompt_tile=tile))
    return Pool(Sequences(heads, 16, lens, torch.float16), backend, spec=replace(SCALED, **asked))


@pytest.mark.parametrize("seed", range(4))
def test_any_prompt(seed: int) -> None:
    """And what it leaves in the cache is right for those that go on from it. (The interpreter cuts bfloat16 off: that is another
    rounding than the one that is allowed.)
    """
    rng = random.Random(seed)
    heads = Heads(rng.choice([1, 2]), rng.choice([1, 2, 3]), rng.choice([64, 128]))
    end = rng.choice([1, rng.randint(2, 127), 128, rng.randint(129, 300)])
    pool = pool_of(heads, [end + 20], tile=rng.choice([64, 128]))
    assert_attended(pool.step(0, [0], [end]), pool.exact([0], [end]))
    assert_attended(pool.step(0, [end], [end + 20]), pool.exact([end], [end + 20]))


@pytest.mark.parametrize(
    ("starts", "asked", "is_whole"),
    [
        ([0], {}, True),
        ([3], {}, False),
        ([0, 0], {}, False),
        ([0], {"window": 7}, False),
        ([0], {"sinks": True}, False),
        ([0], {"soft_cap": 9.0}, False),
    ],
)
def test_it_is_only_for_plain_prompts_without_history_that_are_alone(
    starts: list[int], asked: dict[str, Any], is_whole: bool
) -> None:
    pool = pool_of(Heads(1, 2, 64), [30] * len(starts), **asked)
    seqs, ends = range(len(starts)), [20] * len(starts)
    with noting() as launches:
        pool.attend(0, pool.write_span(seqs, starts, ends), seqs, starts, ends)
    assert (WHOLE in [launch.name for launch in launches]) == is_whole
    assert pool.backend.knows_whole_prompts


def test_without_tuning_queries_stand_alone() -> None:
    pool = pool_of(Heads(1, 2, 64), [30], tile=0)
    assert pool.write_span([0], [0], [20]).is_contiguous()
    assert not pool.backend.knows_whole_prompts


def test_an_int8_cache_is_read() -> None:
    """A prompt that is cached gives the same as one that is not."""
    backend = TritonAttention(16, replace(DEFAULTS, whole_prompt_tile=64))
    pool = Pool(Sequences(Heads(1, 2, 64), 16, [20], torch.float16), backend, quantized=True, spec=SCALED)
    with noting() as launches:
        pool.step(0, [0], [20])
    assert WHOLE not in [launch.name for launch in launches]
