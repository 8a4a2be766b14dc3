from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.engine.kv.groups import CHUNKED, ENCODER, FULL, WINDOW, Groups, KVSpec, group_layers
from tests.engine.kv.toys import FAST

sizes = st.integers(1, 12)
growing = st.one_of(st.just(KVSpec()), st.builds(KVSpec, st.sampled_from([WINDOW, CHUNKED]), sizes))
specs = st.one_of(growing, st.just(KVSpec(ENCODER)))


def sees(spec: KVSpec, position: int, other: int) -> bool:
    """Whether the token at a position sees another of its sequence, as the kinds are defined."""
    if spec.kind == WINDOW:
        return position - spec.size < other <= position
    if spec.kind == CHUNKED:
        return other <= position and other // spec.size == position // spec.size
    return other <= position


@pytest.mark.parametrize(("kind", "size"), [(WINDOW, 0), (CHUNKED, 0), (FULL, 4), (ENCODER, 4), ("state", 0)])
def test_a_spec_has_a_size_if_and_only_if_it_forgets(kind: str, size: int) -> None:
    with pytest.raises(AssertionError):
        KVSpec(kind, size)


def test_specs_are_told_apart_and_read_as_what_they_are() -> None:
    specs = [KVSpec(), KVSpec(WINDOW, 4), KVSpec(WINDOW, 5), KVSpec(CHUNKED, 4), KVSpec(ENCODER)]
    assert [str(spec) for spec in specs] == ["full", "window 4", "window 5", "chunked 4", "encoder"]
    assert [spec.forgets for spec in specs] == [False, True, True, True, False]
    assert len(set(specs)) == 5


@FAST
@given(growing, st.integers(0, 60))
def test_the_first_token_seen_is_that_of_the_definition_and_no_later_token_sees_any_before_it(
    spec: KVSpec, position: int
) -> None:
    seen = [other for other in range(80) if sees(spec, position, other)]
    assert seen == list(range(spec.first_seen(position), position + 1))
    assert spec.first_seen(position) <= spec.first_seen(position + 1)


def test_layers_of_gemma_3_270m_form_six_groups_of_three() -> None:
    """18 layers; every sixth is full, the others have a window of 512."""
    groups = group_layers([KVSpec() if layer % 6 == 5 else KVSpec(WINDOW, 512) for layer in range(18)])
    assert [(str(group.spec), group.layers) for group in groups] == [
        ("window 512", (0, 1, 2)),
        ("window 512", (3, 4, 6)),
        ("window 512", (7, 8, 9)),
        ("window 512", (10, 12, 13)),
        ("window 512", (14, 15, 16)),
        ("full", (5, 11, 17)),
    ]


def test_layers_of_one_spec_are_one_group() -> None:
    [group] = group_layers([KVSpec()] * 28)
    assert group.layers == tuple(range(28))


@FAST
@given(st.lists(st.sampled_from([KVSpec(), KVSpec(WINDOW, 4), KVSpec(CHUNKED, 4)]), min_size=1, max_size=30))
def test_every_layer_is_in_one_group_of_its_spec_and_only_the_last_of_a_spec_is_smaller(layers: list[KVSpec]) -> None:
    groups = group_layers(layers)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(layers)))
    rarest = min(Counter(layers).values())
    for spec in set(layers):
        mine = [group for group in groups if group.spec == spec]
        assert [layers[layer] for group in mine for layer in group.layers] == [spec] * layers.count(spec)
        assert all(len(group.layers) == rarest for group in mine[:-1])
        assert 0 < len(mine[-1].layers) <= rarest


@FAST
@given(growing, st.integers(1, 6), st.integers(1, 12), st.integers(1, 90), st.data())
def test_no_chunking_needs_more_blocks_at_once_than_is_said(
    spec: KVSpec, block_size: int, most_new: int, num_tokens: int, data: st.DataObject
) -> None:
    groups = Groups((spec,), block_size, most_new)
    most = groups.most_blocks(0, num_tokens)
    computed = 0
    while computed < num_tokens:
        count = data.draw(st.integers(1, min(most_new, num_tokens - computed)))
        written = range(computed, computed + count)
        read = [other for position in written for other in range(position) if sees(spec, position, other)]
        assert len({position // block_size for position in [*read, *written]}) <= most
        assert min([*read, *written]) // block_size == groups.first_block(0, computed)
        computed += count


@FAST
@given(sizes, st.integers(1, 6), st.integers(1, 12))
def test_what_is_said_of_a_window_is_at_most_a_block_too_much(size: int, block_size: int, most_new: int) -> None:
    groups = Groups((KVSpec(WINDOW, size),), block_size, most_new)
    needed = [
        (start + most_new - 1) // block_size + 1 - groups.first_block(0, start) for start in range(size, size + 40)
    ]
    assert max(needed) <= groups.most_blocks(0, 999) <= max(needed) + 1


def test_blocks_of_gemma_3_270m_do_not_grow_with_the_sequence_but_in_one_group() -> None:
    """A window of 512 and chunks of 512 see 1,023 tokens at once: 64 blocks of 16, and one since they may begin anywhere."""
    groups = Groups((*[KVSpec(WINDOW, 512)] * 5, KVSpec()), 16, 512)
    assert [groups.most_blocks(0, count) for count in (1, 16, 17, 1023, 1024, 1040, 1041, 32_768)] == [
        1, 1, 2, 64, 64, 65, 65, 65
    ]  # fmt: skip
    assert groups.most_blocks(5, 32_768) == 2048
    assert groups.blocks_at_once(32_768) == 5 * 65 + 2048 == 2373
    assert groups.longest(2373, 40_000) == 32_768
    assert groups.longest(2372, 40_000) == 32_768 - 16
    assert groups.longest(99_999, 40_000) == 40_000


@FAST
@given(st.lists(specs, min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 9), st.integers(0, 60))
def test_the_longest_sequence_is_the_last_that_fits(
    drawn: list[KVSpec], block_size: int, most_new: int, num_blocks: int
) -> None:
    groups = Groups(tuple(drawn), block_size, most_new)
    needed = [sum(groups.most_blocks(group, count) for group in range(len(drawn))) for count in range(81)]
    assert needed == sorted(needed)
    assert groups.longest(num_blocks, 80) == max(count for count in range(81) if needed[count] <= num_blocks)


@FAST
@given(st.lists(specs, min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 12), st.data())
def test_the_longest_hit_is_the_one_of_the_definition_and_no_block_is_looked_at_twice(
    drawn: list[KVSpec], block_size: int, count: int, data: st.DataObject
) -> None:
    groups = Groups(tuple(drawn), block_size, 4)
    holes = data.draw(st.sets(st.tuples(st.integers(0, len(drawn) - 1), st.integers(0, max(count - 1, 0))), max_size=9))
    asked: Counter[tuple[int, int]] = Counter()

    def has(group: int, block: int) -> bool:
        asked[group, block] += 1
        assert 0 <= block < count
        return (group, block) not in holes

    def serves(group: int, end: int) -> bool:
        """Whether a group that forgets has all that the token behind `end` blocks sees."""
        position = end * block_size
        needed = {other // block_size for other in range(position) if sees(drawn[group], position, other)}
        return not any((group, block) in holes for block in needed)

    forgetting = [group for group, spec in enumerate(drawn) if spec.forgets]
    expected = max(end for end in range(count + 1) if all(serves(group, end) for group in forgetting))
    assert groups.longest_hit(count, has) == expected
    assert set(asked.values()) <= {1}
    assert {group for group, _ in asked} <= set(forgetting), "of the others it is told how many they have"
