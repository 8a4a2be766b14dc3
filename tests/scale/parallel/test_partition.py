"""Every output and every head is some rank's."""

from __future__ import annotations

import pytest

from nanoengine.errors import InvalidConfig
from nanoengine.models.model_config import StateConfig
from nanoengine.scale.parallel.partition import UNIT, Partition
from nanoengine.scale.parallel.states import units_of_ranks


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 8, 16, 33, 128, 576, 1000, 49152])
def test_outputs_are_shared_out_once(count: int, size: int) -> None:
    found = Partition(size, 64, 64, 64).outputs(count)
    assert len(found) == size
    if count < size:
        assert found == [range(count)] * size
        return
    assert [i for own in found for i in own] == list(range(count))
    unit = UNIT if count >= UNIT * size else 1
    assert all(own.start % unit == 0 for own in found)
    assert all(found), "nobody is idle"
    assert max(map(len, found)) <= -(-count // size) + unit


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (16, 8), (32, 8), (7, 1), (3, 3), (8, 2), (64, 1)])
def test_heads_are_shared_out_and_have_their_kv_heads(heads: int, kv_heads: int) -> None:
    group = heads // kv_heads
    for size in range(1, heads + 1):
        partition = Partition(size, heads, kv_heads, 16)
        assert [i for own in partition.heads for i in own] == list(range(heads))
        assert {i for own in partition.kv_heads for i in own} == set(range(kv_heads))
        for own, seen in zip(partition.heads, partition.kv_heads, strict=True):
            assert len(own) % len(seen) == 0, "as kernels group them"
            per_kv_head = len(own) // len(seen)
            assert [i // group for i in own] == [seen[i // per_kv_head] for i in range(len(own))]
        assert partition.columns(partition.heads)[-1].stop == heads * 16


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 3), (8, 1), (8, 4)])
def test_heads_of_states_are_shared_out_with_their_groups(heads: int, groups: int) -> None:
    facts = StateConfig(taps=4, channels=99, num_heads=heads, num_groups=groups, depth=2, width=3)
    for size in range(1, heads + 1):
        units = units_of_ranks(facts, size)
        assert [i for own in units["heads"] for i in own] == list(range(heads))
        for own, shared in zip(units["heads"], units["groups"], strict=True):
            assert {i * groups // heads for i in own} == set(shared)
    with pytest.raises(InvalidConfig, match=f"but the model has {heads} heads in its layers with states"):
        units_of_ranks(facts, heads + 1)


def test_a_convolution_alone_is_shared_by_channels() -> None:
    assert units_of_ranks(StateConfig(taps=3, channels=100), 3) == {
        "channels": [range(32), range(32, 64), range(64, 100)]
    }


def test_heads_of_a_group_that_stand_apart_are_refused() -> None:
    facts = StateConfig(taps=4, channels=96, num_heads=4, num_groups=2, depth=8, width=8, is_tiled=True)
    with pytest.raises(InvalidConfig, match="GGUF file heads that share queries and keys stand apart"):
        units_of_ranks(facts, 2)
