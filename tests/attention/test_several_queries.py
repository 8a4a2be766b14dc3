"""Decodes of a few tokens each, as when drafts are verified, through backends that read the cache once for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.core.attention import AttentionSpec
from tests.attention.every_backend import BLOCK_SIZES, both_dtypes, running
from tests.attention.paged import PLAIN, Heads, Pool, Sequences, assert_attended, exact_pool
from tests.attention.test_mixed_batches import with_padding
from tests.drawn import FAST

BACKENDS = ("torch", "native")

every_one = pytest.mark.parametrize("name", BACKENDS)


def check(name: str, sequences: Sequences, num_decodes: int, starts: list[int], spec: AttentionSpec = PLAIN) -> None:
    """Tokens of sequence i from starts[i] on, in one step, are what the prefill of the reference says to them."""
    with running(name, sequences.heads.dim, sequences.dtype, quick=True) as backend:
        pool = Pool(sequences, backend, norms=False, rotated=False, spec=spec)
        pool.fill(starts)
        out = pool.mixed(num_decodes, starts, sequences.lens)
    exact = exact_pool(sequences, norms=False, rotated=False, spec=spec)
    exact.fill(starts)
    assert_attended(out, exact.prefill(starts, sequences.lens), starts, sequences.lens, spec)


@every_one
@both_dtypes
@pytest.mark.parametrize("heads", [Heads(2, 1, 32), Heads(1, 3, 32), Heads(2, 8, 64)], ids=str)
def test_a_few_tokens_and_one_in_one_batch(name: str, heads: Heads, dtype: torch.dtype) -> None:
    """Within a block and across one, whole sequences, some with one token; then chunks."""
    size = BLOCK_SIZES[name]
    lens = [size + 3, size, 4, 2 * size + 1, 17, 1, size + 9, size]
    starts = [size - 2, size - 1, 0, 2 * size - 16, 0, 0, 3, size - 1]
    check(name, Sequences(heads, size, lens, dtype), 6, starts)


@every_one
@FAST
@given(st.data())
def test_any_batch_of_any_attention(name: str, data: st.DataObject) -> None:
    sizes = st.one_of(st.none(), st.integers(1, 60))
    spec = AttentionSpec(1.0, data.draw(sizes), data.draw(st.booleans()), data.draw(st.sampled_from([None, 2.0])))
    lens = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=5))
    num_decodes = data.draw(st.integers(1, len(lens)))
    starts = [
        max(0, n - data.draw(st.integers(1, 17))) if i < num_decodes else data.draw(st.integers(0, n - 1))
        for i, n in enumerate(lens)
    ]
    sequences = Sequences(Heads(1, 2, 32), BLOCK_SIZES[name], lens, seed=data.draw(st.integers(0, 99)))
    check(name, sequences, num_decodes, starts, spec)


@every_one
@pytest.mark.parametrize("spec", [PLAIN, AttentionSpec(1.0, window=20)], ids=str)
def test_the_host_may_know_upper_bounds_alone(name: str, spec: AttentionSpec) -> None:
    """Lengths on the device are what counts: the ends of drafts are seen there first."""
    lens = [40, 33, 70]
    starts, bounds = [n - 5 for n in lens], [n + 13 for n in lens]
    sequences = Sequences(Heads(1, 2, 32), BLOCK_SIZES[name], lens)
    with running(name, 32, torch.float32, quick=True) as backend:
        pool = Pool(sequences, backend, norms=False, rotated=False, spec=spec)
        pool.fill(starts)
        q = pool.write_span([0, 1, 2], starts, lens)
        metadata = pool.metadata(3, [0, 1, 2], starts, lens)
        exact = backend.attend(q, pool.k_cache, pool.v_cache, metadata, spec)
        bounded = replace(metadata, seq_lens_list=bounds)
        out = backend.attend(q, pool.k_cache, pool.v_cache, bounded, spec)
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-5)


@every_one
def test_a_later_token_that_is_nan_reaches_none_before_it(name: str) -> None:
    lens, starts = [40, 33, 17], [35, 28, 0]
    sequences = Sequences(Heads(1, 2, 32), BLOCK_SIZES[name], lens)
    with running(name, 32, torch.float32, quick=True) as backend:
        pool = Pool(sequences, backend, norms=False, rotated=False)
        pool.fill(starts)
        q = pool.write_span([0, 1, 2], starts, lens)
        before = pool.attend(3, q, [0, 1, 2], starts, lens)
        for row, position in ((0, 37), (1, 32), (2, 5)):
            nan = torch.full_like(sequences.qkv[row][:1], torch.nan)
            pool.write(nan, torch.tensor([position]), torch.tensor(sequences.slots(row, position, position + 1)))
        after = pool.attend(3, q, [0, 1, 2], starts, lens)
    poisoned = torch.tensor([*[False] * 2, *[True] * 3, *[False] * 4, True, *[False] * 5, *[True] * 12])
    assert after[poisoned].isnan().all()
    torch.testing.assert_close(after[~poisoned], before[~poisoned], rtol=1e-5, atol=1e-5)


@every_one
def test_padding_rows_change_nothing(name: str) -> None:
    """Of length 0, in slot -1, behind the decodes."""
    lens, starts = [40, 33, 17, 20], [35, 32, 0, 3]
    sequences = Sequences(Heads(1, 2, 32), BLOCK_SIZES[name], lens)
    rows = range(len(lens))
    with running(name, 32, torch.float32, quick=True) as backend:
        pool = Pool(sequences, backend, norms=False, rotated=False)
        pool.fill(starts)
        q = pool.write_span(rows, starts, lens)
        metadata = pool.metadata(3, rows, starts, lens)
        count = metadata.num_decode_tokens
        alone = backend.attend(q, pool.k_cache, pool.v_cache, metadata, PLAIN)
        padded_q = torch.cat((q[:count], torch.randn(2, *q.shape[1:]), q[count:]))
        padded = backend.attend(padded_q, pool.k_cache, pool.v_cache, with_padding(metadata, 2), PLAIN)
    torch.testing.assert_close(torch.cat((padded[:count], padded[count + 2 :])), alone, rtol=1e-5, atol=1e-5)
