"""Which layers share blocks, how many blocks a sequence needs, and what of a prompt is found again behind a window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.features.kv_groups.layouts import BlockDemand, KVGroup, WindowLayout, group_layers
from tests.core.toys import ToyModel, make_engine, run

windows = st.one_of(st.none(), st.integers(1, 20))


@given(st.lists(st.sampled_from([None, 4, 8]), min_size=1, max_size=30))
def test_every_layer_is_in_one_group_of_its_window_and_only_the_last_of_a_window_is_smaller(
    layers: list[int | None],
) -> None:
    groups = group_layers(layers)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(layers)))
    rarest = min(map(layers.count, set(layers)))
    for window in set(layers):
        mine = [group for group in groups if group.window == window]
        assert all(layers[layer] == window for group in mine for layer in group.layers)
        assert all(len(group.layers) == rarest for group in mine[:-1])
        assert 0 < len(mine[-1].layers) <= rarest


@given(st.integers(1, 12), st.integers(0, 60))
def test_a_window_sees_its_last_tokens_and_a_chunk_the_tokens_of_its_own(size: int, position: int) -> None:
    tokens = range(position + 1)
    in_window = [other for other in tokens if position - size < other]
    in_chunk = [other for other in tokens if other // size == position // size]
    assert list(tokens[WindowLayout(size, 1).first_visible(position) :]) == in_window
    assert list(tokens[WindowLayout(size, 1, chunked=True).first_visible(position) :]) == in_chunk


@given(
    st.lists(windows, min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 9),
    st.integers(1, 30),
    st.integers(1, 2),  # more steps are never in flight
    st.integers(2, 80),
    st.integers(1, 79),
)
def test_one_sequence_is_never_preempted_in_the_smallest_pool(
    windows: list[int | None], chunked: bool, block_size: int, most_new: int, depth: int, length: int, num_prompt: int
) -> None:
    groups = [KVGroup(window, [0], chunked) for window in windows]
    num_blocks = BlockDemand(groups, block_size, most_new, depth).num_blocks(length)
    layouts = [group.layout(most_new) for group in groups]
    engine = make_engine(
        blocks=BlockManager(num_blocks, block_size, layouts),
        model=ToyModel(block_size, layouts=layouts),
        max_model_len=length,
        max_chunk=most_new,
        depth=depth,
        max_num_seqs=3,
    )
    prompt = [number % 50 for number in range(min(num_prompt, length - 1))]
    request = engine.make_request(prompt, CoreSamplingParams(max_tokens=None, ignore_eos=True, seed=1))
    run(engine, [request])
    assert len(prompt) + len(request.sequences[0].output_token_ids) == length
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    ("window", "chunked", "num_kept", "shorter"),
    [
        *((9, False, 2, 0), (8, False, 2, 0), (5, False, 1, 0), (4, False, 1, 0)),
        # Behind 12 tokens, a chunk is over, or the block before is enough, or all three are needed.
        *((12, True, 1, 12), (11, True, 2, 12), (9, True, 2, 12), (15, True, 1, 0)),
    ],
)
def test_a_prefix_is_hit_behind_a_window_whose_beginning_is_gone(
    window: int, chunked: bool, num_kept: int, shorter: int
) -> None:
    """The blocks that the next token sees are enough, and one fewer is no hit."""
    layouts = [KVGroup(own, [0], chunked).layout(64) for own in (None, window)]
    blocks = BlockManager(100, 4, layouts)
    engine = make_engine(blocks=blocks, model=ToyModel(4, layouts=layouts))
    prompt, params = list(range(17)), CoreSamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    run(engine, [first := engine.make_request(prompt, params)])
    hashes = [hash for hash, _ in first.sequences[0].block_hashes]
    for hash in hashes[: 4 - num_kept]:
        blocks._unpublish(blocks.index[1][hash])
    run(engine, [second := engine.make_request(prompt, params)])
    assert second.output().num_cached_tokens == 16
    assert second.sequences[0].token_ids == first.sequences[0].token_ids
    blocks._unpublish(blocks.index[1][hashes[3]])
    run(engine, [third := engine.make_request(prompt, params)])
    assert third.output().num_cached_tokens == shorter
    assert third.sequences[0].token_ids == first.sequences[0].token_ids
