"""What the torch backend adds to the core's, against dense attention in float64; what no query sees any more is NaN."""

from __future__ import annotations

from itertools import takewhile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoengine import LLM, SamplingParams
from nanoengine.attention import torch_reference
from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.core import torch_attention
from nanoengine.core.attention import AttentionSpec
from tests.core.paged_attention import SCALE, Paged, assert_equal, attention_calls
from tests.drawn import FAST
from tests.support import model_runner

A_FEW = 17  # tokens of a decode


def check_step(spec: AttentionSpec, block_size: int, lens: list[int], starts: list[int], seed: int = 0) -> None:
    """One step, in which sequence i gets its tokens from starts[i] on; leading sequences that get a few decode."""
    paged = Paged(lens, block_size, spec=spec, seed=seed, backend=TorchAttention)
    paged.write([0] * len(lens), starts)
    num_decodes = len(list(takewhile(lambda i: lens[i] - starts[i] <= A_FEW, range(len(lens)))))
    assert_equal(*paged.mixed(num_decodes, starts, lens))


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 39, 40, 41, 1000])
def test_windows_around_every_edge(size: int, block_size: int) -> None:
    spec = AttentionSpec(SCALE, window=size)
    check_step(spec, block_size, [40, 17, 1, 40], [39, 16, 0, 0])
    check_step(spec, block_size, [40, 33, 41], [17, 0, 25])
    check_step(spec, block_size, [40, 33, 41, 17, 4], [35, 28, 24, 0, 0])


sizes = st.one_of(st.none(), st.integers(1, 64))


@FAST
@given(st.data(), sizes, st.booleans(), st.sampled_from([None, 0.5, 3.0, 50.0]), st.integers(0, 99))
def test_any_step_of_any_attention(
    data: st.DataObject, window: int | None, sinks: bool, soft_cap: float | None, seed: int
) -> None:
    spec = AttentionSpec(SCALE, window, sinks, soft_cap)
    lens = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
    num_decodes = data.draw(st.integers(0, len(lens)))
    starts = [
        max(0, n - data.draw(st.integers(1, A_FEW))) if i < num_decodes else data.draw(st.integers(0, n - 1))
        for i, n in enumerate(lens)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_reference, "SHORT", data.draw(st.sampled_from([1, 64])))
        patch.setattr(torch_attention, "MAX_SCORES", data.draw(st.sampled_from([1, 300, 1 << 24])))
        check_step(spec, data.draw(st.sampled_from([1, 4, 16])), lens, starts, seed)


@pytest.mark.parametrize("decoding", [False, True])
def test_a_sink_that_outweighs_all_tokens_leaves_nothing_of_them(decoding: bool) -> None:
    paged = Paged([5], 4, spec=AttentionSpec(SCALE, sinks=True), backend=TorchAttention)
    paged.sinks = torch.tensor([1e4, -1e4, 0.0, 1e4])
    paged.write([0], [4])
    out, _ = paged.mixed(int(decoding), [4], [5])
    assert not out[:, [0, 3]].any()
    assert out[:, [1, 2]].isfinite().all()
    assert out[:, [1, 2]].any(-1).all()


def test_what_is_gathered_follows_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    attended = attention_calls(monkeypatch)
    monkeypatch.setattr(torch_reference, "SHORT", 8)
    spec = AttentionSpec(SCALE, window=20)
    check_step(spec, 16, [600, 20, 500], [599, 19, 499])
    assert attended
    assert all(num_keys <= 20 for _, _, num_keys in attended)
    attended.clear()
    check_step(spec, 16, [200], [0])
    assert sum(num_queries for _, num_queries, _ in attended) == 200
    assert all(num_keys < num_queries + 20 and num_queries <= 20 for _, num_queries, num_keys in attended)


@pytest.mark.parametrize(("max_scores", "max_gathered_tokens"), [(1, 1), (50, 40)])
def test_tokens_do_not_depend_on_the_bounds(
    monkeypatch: pytest.MonkeyPatch, tiny_llm: LLM, max_scores: int, max_gathered_tokens: int
) -> None:
    assert model_runner(tiny_llm).backend.name == "torch"
    prompts = [[(7 * i + j) % 200 for j in range(length)] for i, length in enumerate([1, 90, 5, 33, 150, 8])]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def tokens() -> list[list[int]]:
        assert tiny_llm.reset_prefix_cache()
        return [output.outputs[0].token_ids for output in tiny_llm.generate(prompts, params, use_tqdm=False)]

    expected = tokens()
    monkeypatch.setattr(torch_attention, "MAX_SCORES", max_scores)
    monkeypatch.setattr(torch_reference, "MAX_GATHERED_TOKENS", max_gathered_tokens)
    assert tokens() == expected
