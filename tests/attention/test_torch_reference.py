"""The torch backend against dense attention, in float64, over paged caches whose unwritten slots hold NaN."""

from __future__ import annotations

import math
import random
from itertools import takewhile

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanoengine import LLM, SamplingParams
from nanoengine.attention import torch_reference
from nanoengine.attention.backend import AttentionMetadata, AttentionSpec
from nanoengine.attention.torch_reference import TorchAttention
from tests.engine.toys import FAST
from tests.support import model_runner

HEAD_DIM = 8
SCALE = 0.3  # not head_dim ** -0.5: the factor that is passed counts
PLAIN = AttentionSpec(SCALE)
A_FEW = 17  # tokens of a decode


def first_seen(position: int, spec: AttentionSpec) -> int:
    """Counted backwards from the token itself, one by one."""
    first = position
    while first > 0 and (spec.window is None or position - first + 1 < spec.window):
        first -= 1
    return first


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, first: int, spec: AttentionSpec = PLAIN, sinks: Tensor | None = None
) -> Tensor:
    """Query j stands at position first + j. One sequence, float64, token by token, head by head."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for j in range(q.shape[0]):
        seen = slice(first_seen(first + j, spec), first + j + 1)
        for head in range(q.shape[1]):
            scores = k[seen, head // group] @ q[j, head] * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
            weights = scores.exp()
            total = weights.sum() if sinks is None else weights.sum() + sinks[head].double().exp()
            out[j, head] = weights / total @ v[seen, head // group]
    return out


class Paged:
    """Random sequences in a NaN-filled pool, at shuffled blocks."""

    def __init__(
        self,
        seq_lens: list[int],
        block_size: int,
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        seed: int = 0,
        spec: AttentionSpec = PLAIN,
    ):
        generator = torch.Generator().manual_seed(seed)
        self.block_size = block_size
        self.num_heads = num_heads
        self.seq_lens = seq_lens
        self.generator = generator
        self.backend = TorchAttention(block_size)
        counts = [math.ceil(n / block_size) for n in seq_lens]
        blocks = list(range(1, sum(counts) + 3))
        random.Random(seed).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(count)] for count in counts]
        shape = self.backend.kv_shape(sum(counts) + 3, num_kv_heads, HEAD_DIM)
        self.k_cache = torch.full(shape, float("nan"))
        self.v_cache = torch.full(shape, float("nan"))
        self.k = [torch.randn(n, num_kv_heads, HEAD_DIM, generator=generator) for n in seq_lens]
        self.v = [torch.randn(n, num_kv_heads, HEAD_DIM, generator=generator) for n in seq_lens]
        self.spec = spec
        self.sinks = torch.randn(num_heads, generator=generator) if spec.sinks else None

    def slots(self, i: int, start: int, end: int) -> list[int]:
        size = self.block_size
        return [self.tables[i][p // size] * size + p % size for p in range(start, end)]

    def write(self, starts: list[int], ends: list[int]) -> list[int]:
        """Write the K/V of positions starts[i] to ends[i] of every sequence; returns the slots."""
        spans = list(enumerate(zip(starts, ends, strict=True)))
        slots = [slot for i, (start, end) in spans for slot in self.slots(i, start, end)]
        k = torch.cat([self.k[i][start:end] for i, (start, end) in spans])
        v = torch.cat([self.v[i][start:end] for i, (start, end) in spans])
        self.backend.write_kv(k, v, self.k_cache, self.v_cache, torch.tensor(slots, dtype=torch.int64))
        return slots

    def forget(self, starts: list[int]) -> None:
        """NaN in all that no token of sequence i sees from starts[i] on."""
        for i, start in enumerate(starts):
            slots = self.slots(i, 0, first_seen(start, self.spec))
            for cache in (self.k_cache, self.v_cache):
                cache.flatten(0, 1)[slots] = float("nan")

    def metadata(self, num_decodes: int, starts: list[int], ends: list[int], slots: list[int]) -> AttentionMetadata:
        lens = [end - start for start, end in zip(starts, ends, strict=True)]
        tables = [table[: math.ceil(end / self.block_size)] for table, end in zip(self.tables, ends, strict=True)]
        for table, start in zip(tables, starts, strict=True):
            unseen = first_seen(start, self.spec) // self.block_size
            table[:unseen] = [0] * unseen
        width = max(map(len, tables))
        return AttentionMetadata(
            kv_cache=[(self.k_cache, self.v_cache)],
            slot_mapping=torch.tensor(slots),
            num_decodes=num_decodes,
            query_start_loc=torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
            query_lens_list=lens,
            seq_lens_list=ends,
        )

    def prefill(self, starts: list[int], ends: list[int]) -> tuple[Tensor, Tensor]:
        return self.mixed(0, starts, ends)

    def decode(self, starts: list[int], ends: list[int]) -> tuple[Tensor, Tensor]:
        return self.mixed(len(ends), starts, ends)

    def mixed(self, num_decodes: int, starts: list[int], ends: list[int]) -> tuple[Tensor, Tensor]:
        """Write positions starts[i] to ends[i], attend from them; returns what the backend says and what is right."""
        metadata = self.metadata(num_decodes, starts, ends, self.write(starts, ends))
        queries = [
            torch.randn(end - start, self.num_heads, HEAD_DIM, generator=self.generator)
            for start, end in zip(starts, ends, strict=True)
        ]
        self.forget(starts)
        out = self.backend.attend(torch.cat(queries), self.k_cache, self.v_cache, metadata, self.spec, self.sinks)
        expected = [
            dense_attention(q, self.k[i][:end], self.v[i][:end], start, self.spec, self.sinks)
            for i, (q, start, end) in enumerate(zip(queries, starts, ends, strict=True))
        ]
        return out, torch.cat(expected)


def assert_equal(out: Tensor, expected: Tensor) -> None:
    assert out.shape == expected.shape
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def boundary_lengths(block_size: int) -> list[int]:
    return sorted({n for n in (1, block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 1) if n})


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_prefill_of_whole_prompts_at_every_block_boundary(block_size: int) -> None:
    for n in boundary_lengths(block_size):
        assert_equal(*Paged([n], block_size, seed=n).prefill([0], [n]))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_decode_at_every_block_boundary(block_size: int) -> None:
    for n in boundary_lengths(block_size):
        paged = Paged([n], block_size, seed=n)
        if n > 1:
            paged.write([0], [n - 1])
        assert_equal(*paged.decode([n - 1], [n]))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 1), (6, 2), (8, 2)])
def test_query_heads_share_the_right_kv_heads(heads: tuple[int, int]) -> None:
    num_heads, num_kv_heads = heads
    paged = Paged([11, 6], 4, num_heads=num_heads, num_kv_heads=num_kv_heads)
    assert_equal(*paged.prefill([0, 0], [10, 5]))
    assert_equal(*paged.decode([10, 5], [11, 6]))


def test_prefill_of_mixed_lengths_in_one_batch() -> None:
    lens = [1, 9, 4, 3, 17, 5]
    assert_equal(*Paged(lens, 4).prefill([0] * len(lens), lens))


def test_decode_of_mixed_lengths_in_one_batch() -> None:
    lens = [1, 9, 4, 3, 17, 5, 40]
    paged = Paged(lens, 4)
    paged.write([0] * len(lens), [n - 1 for n in lens])
    assert_equal(*paged.decode([n - 1 for n in lens], lens))


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 8, 13])
def test_prefill_in_chunks_sees_the_history_and_nothing_after(chunk: int) -> None:
    paged = Paged([13], 4)
    for start in range(0, 13, chunk):
        assert_equal(*paged.prefill([start], [min(start + chunk, 13)]))


def test_a_batch_of_fresh_prompts_and_later_chunks() -> None:
    paged = Paged([9, 12, 20, 6], 4)
    paged.write([0, 0, 0, 0], [0, 5, 16, 5])
    assert_equal(*paged.prefill([0, 5, 16, 5], [9, 12, 19, 6]))


def test_prefill_of_one_last_token_is_its_decode() -> None:
    prefilled, decoded = Paged([10], 4), Paged([10], 4)
    for paged in (prefilled, decoded):
        paged.write([0], [9])
    out = prefilled.prefill([9], [10])[0]
    torch.testing.assert_close(decoded.decode([9], [10])[0], out)


def test_slots_that_nobody_wrote_are_never_read() -> None:
    """The tails of last blocks, other blocks and the null block hold NaN; padding of a batch must not bring it in."""
    lens = [1, 30, 5]
    paged = Paged(lens, 16)
    out, _ = paged.prefill([0, 0, 0], [1, 29, 4])
    assert out.isfinite().all()
    out, _ = paged.decode([0, 29, 4], lens)
    assert out.isfinite().all()
    assert paged.k_cache[0].isnan().all()


def test_sequences_may_share_blocks() -> None:
    """One prefix of two blocks, three continuations of different lengths."""
    paged = Paged([9, 11, 14], 4)
    for i in (1, 2):
        paged.tables[i][:2] = paged.tables[0][:2]
        paged.k[i][:8], paged.v[i][:8] = paged.k[0][:8], paged.v[0][:8]
    paged.write([0, 8, 8], [8, 8, 8])
    assert_equal(*paged.prefill([8, 8, 8], [9, 10, 13]))
    assert_equal(*paged.decode([8, 10, 13], [9, 11, 14]))


def test_a_block_written_in_this_step_may_be_read_by_another_sequence_of_it() -> None:
    paged = Paged([9, 10], 4)
    paged.tables[1][:2] = paged.tables[0][:2]
    paged.k[1][:8], paged.v[1][:8] = paged.k[0][:8], paged.v[0][:8]
    assert_equal(*paged.prefill([0, 8], [9, 10]))


def test_write_kv_puts_each_token_into_its_slot_and_touches_no_other() -> None:
    backend = TorchAttention(4)
    k, v = torch.randn(3, 2, HEAD_DIM), torch.randn(3, 2, HEAD_DIM)
    k_cache, v_cache = torch.full((2, *backend.kv_shape(4, 2, HEAD_DIM)), float("nan"))
    backend.write_kv(k, v, k_cache, v_cache, torch.tensor([14, 5, 7]))
    for cache, source in ((k_cache, k), (v_cache, v)):
        for row, (block, offset) in enumerate([(3, 2), (1, 1), (1, 3)]):
            assert torch.equal(cache[block, offset], source[row])
        assert cache.isfinite().sum() == source.numel()


@pytest.mark.parametrize("slots", [[-1, -1, -1], [-1, 9, -1], [9, -1, -1]])
def test_slot_minus_1_is_not_written(slots: list[int]) -> None:
    backend = TorchAttention(4)
    k, v = torch.randn(3, 2, HEAD_DIM), torch.randn(3, 2, HEAD_DIM)
    k_cache, v_cache = torch.full((2, *backend.kv_shape(4, 2, HEAD_DIM)), float("nan"))
    backend.write_kv(k, v, k_cache, v_cache, torch.tensor(slots))
    for cache, source in ((k_cache, k), (v_cache, v)):
        written = [row for row, slot in enumerate(slots) if slot >= 0]
        assert cache.isfinite().sum() == len(written) * 2 * HEAD_DIM
        for row in written:
            assert torch.equal(cache[2, 1], source[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_stay_what_they_are(dtype: torch.dtype) -> None:
    paged = Paged([7, 3], 4)
    paged.k_cache, paged.v_cache = paged.k_cache.to(dtype), paged.v_cache.to(dtype)
    paged.k, paged.v = [k.to(dtype) for k in paged.k], [v.to(dtype) for v in paged.v]
    metadata = paged.metadata(0, [0, 0], [7, 3], paged.write([0, 0], [7, 3]))
    q = torch.randn(10, 4, HEAD_DIM).to(dtype)
    out = paged.backend.attend(q, paged.k_cache, paged.v_cache, metadata, AttentionSpec(SCALE))
    expected = torch.cat(
        [dense_attention(q[:7], paged.k[0], paged.v[0], 0), dense_attention(q[7:], paged.k[1], paged.v[1], 0)]
    )
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)


# ---- windows, sinks and soft caps

Shape = tuple[int, int, int]


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """(sequences, queries of each, keys of each) of every call of torch's attention."""
    calls: list[Shape] = []
    attend = F.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, *rest: Tensor, **options: object) -> Tensor:
        calls.append((k.shape[0], q.shape[2], k.shape[2]))
        return attend(q, k, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    return calls


def check_step(spec: AttentionSpec, block_size: int, lens: list[int], starts: list[int], seed: int = 0) -> None:
    """One step, in which sequence i gets its tokens from starts[i] on; leading sequences that get a few decode."""
    paged = Paged(lens, block_size, spec=spec, seed=seed)
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
        patch.setattr(torch_reference, "MAX_SCORES", data.draw(st.sampled_from([1, 300, 1 << 24])))
        check_step(spec, data.draw(st.sampled_from([1, 4, 16])), lens, starts, seed)


@pytest.mark.parametrize("decoding", [False, True])
def test_a_sink_that_outweighs_all_tokens_leaves_nothing_of_them(decoding: bool) -> None:
    paged = Paged([5], 4, spec=AttentionSpec(SCALE, sinks=True))
    paged.sinks = torch.tensor([1e4, -1e4, 0.0, 1e4])
    paged.write([0], [4])
    out, _ = paged.mixed(int(decoding), [4], [5])
    assert not out[:, [0, 3]].any()
    assert out[:, [1, 2]].isfinite().all()
    assert out[:, [1, 2]].any(-1).all()


def test_what_is_gathered_follows_the_window(monkeypatch: pytest.MonkeyPatch, attended: list[Shape]) -> None:
    monkeypatch.setattr(torch_reference, "SHORT", 8)
    spec = AttentionSpec(SCALE, window=20)
    check_step(spec, 16, [600, 20, 500], [599, 19, 499])
    assert attended
    assert all(num_keys <= 20 for _, _, num_keys in attended)
    attended.clear()
    check_step(spec, 16, [200], [0])
    assert sum(num_queries for _, num_queries, _ in attended) == 200
    assert all(num_keys < num_queries + 20 and num_queries <= 20 for _, num_queries, num_keys in attended)


def test_decodes_of_a_few_tokens_gather_each_sequence_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[tuple[int, ...]] = []
    gather = torch_reference._gather

    def counted(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        gathered.append(tuple(slots.shape))
        return gather(cache, slots, dtype)

    monkeypatch.setattr(torch_reference, "_gather", counted)
    check_step(PLAIN, 4, [30, 40, 9, 8], [26, 36, 8, 7])
    assert gathered == [(2, 9)] * 2 + [(2, 40)] * 2


# ---- bounded memory

MIXED = [1, 3500, 2, 64, 65, 17, 700, 1, 129, 900, 1800, 30, 3499, 16]


def decode(paged: Paged) -> tuple[Tensor, Tensor]:
    before = [n - 1 for n in paged.seq_lens]
    paged.write([0] * len(before), before)
    return paged.decode(before, paged.seq_lens)


@pytest.mark.parametrize("limit", [1, 100, 4000, 1 << 17])
def test_decode_of_very_mixed_lengths_is_right_in_groups_of_any_size(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(torch_reference, "MAX_GATHERED_TOKENS", limit)
    assert_equal(*decode(Paged(MIXED, 16)))


def test_decode_does_not_pad_short_sequences_to_a_long_one(attended: list[Shape]) -> None:
    assert_equal(*decode(Paged([3500] + [100] * 20, 16)))
    assert sorted((num_seqs, seq_len) for num_seqs, _, seq_len in attended) == [(1, 3500), (20, 100)]


def test_decode_gathers_a_bounded_number_of_tokens_at_once(
    monkeypatch: pytest.MonkeyPatch, attended: list[Shape]
) -> None:
    monkeypatch.setattr(torch_reference, "MAX_GATHERED_TOKENS", 250)
    assert_equal(*decode(Paged([100] * 7, 16)))
    assert [(num_seqs, seq_len) for num_seqs, _, seq_len in attended] == [(2, 100)] * 3 + [(1, 100)]


@FAST
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 3)), max_size=30),
    st.sampled_from([1, 64, 1000, 20_000, torch_reference.MAX_GATHERED_TOKENS]),
)
def test_groups_hold_every_sequence_once_within_both_bounds(lens: list[tuple[int, int]], limit: int) -> None:
    seq_lens, query_lens = [seq_len for seq_len, _ in lens], [query_len for _, query_len in lens]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_reference, "MAX_GATHERED_TOKENS", limit)
        groups = list(torch_reference._groups(seq_lens, query_lens))
    assert sorted(i for group in groups for i in group) == list(range(len(seq_lens)))
    for group in groups:
        assert len({query_lens[i] for i in group}) == 1
        longest = seq_lens[group[-1]]
        assert longest == max(seq_lens[i] for i in group)
        assert len(group) * longest <= limit or len(group) == 1
        assert longest <= max(2 * min(seq_lens[i] for i in group), torch_reference.SHORT)


@pytest.mark.parametrize("max_scores", [1, 20, 45, 100])
@pytest.mark.parametrize("history", [[0, 0, 0], [5, 16, 1]], ids=["fresh", "later chunks"])
def test_prefill_in_slices_of_any_size_is_right(
    monkeypatch: pytest.MonkeyPatch, max_scores: int, history: list[int]
) -> None:
    monkeypatch.setattr(torch_reference, "MAX_SCORES", max_scores)
    paged = Paged([12, 23, 9], 4)
    if any(history):
        paged.write([0, 0, 0], history)
    assert_equal(*paged.prefill(history, paged.seq_lens))


@pytest.mark.parametrize("history", [0, 10])
def test_prefill_computes_a_bounded_number_of_scores_at_once(
    monkeypatch: pytest.MonkeyPatch, attended: list[Shape], history: int
) -> None:
    monkeypatch.setattr(torch_reference, "MAX_SCORES", 90)
    paged = Paged([30], 4)
    if history:
        paged.write([0], [history])
    assert_equal(*paged.prefill([history], [30]))
    assert sum(num_queries for _, num_queries, _ in attended) == 30 - history
    assert max(num_queries * seq_len for _, num_queries, seq_len in attended) <= 90


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
    monkeypatch.setattr(torch_reference, "MAX_SCORES", max_scores)
    monkeypatch.setattr(torch_reference, "MAX_GATHERED_TOKENS", max_gathered_tokens)
    assert tokens() == expected
