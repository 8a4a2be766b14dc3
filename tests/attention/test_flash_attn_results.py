"""What the package flash-attn computes, with stand-ins for its versions, against the reference in float64."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.attention import flash_attn
from nanoengine.attention.backend import choose_backend
from nanoengine.attention.flash_attn import FlashAttention
from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.core.attention import AttentionMetadata, AttentionSpec
from nanoengine.errors import InvalidConfig
from tests.attention.paged import PLAIN, Heads, Pool, Sequences, assert_attended
from tests.attention.stand_ins import PACKAGES, installed
from tests.drawn import FAST
from tests.support import TOY

CPU = torch.device("cpu")
BLOCK = 256
EDGES = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3]

every_package = pytest.mark.parametrize("package", PACKAGES)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """K/V are written by torch: the interpreter of Triton takes its time for every token."""
    monkeypatch.setattr(flash_attn, "triton_unsupported_reason", lambda _: "it is slow")


def backend_of(block_size: int = BLOCK) -> FlashAttention:
    assert FlashAttention.unsupported_reason(CPU, torch.bfloat16, 16, block_size) is None
    return FlashAttention(block_size)


class Double(TorchAttention):
    """The reference in float64, over K and V as torch writes them in any dtype."""

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return super().attend(q.double(), k_cache.double(), v_cache.double(), metadata, spec, sinks)


def pools(sequences: Sequences, spec: AttentionSpec = PLAIN) -> tuple[Pool, Pool]:
    backends = backend_of(sequences.block_size), Double(sequences.block_size)
    return Pool(sequences, backends[0], spec=spec), Pool(sequences, backends[1], spec=spec)


def check_prefill(sequences: Sequences, starts: list[int], spec: AttentionSpec = PLAIN) -> None:
    """Prefill up to `starts` and then the rest."""
    results = []
    for pool in pools(sequences, spec):
        pool.fill(starts)
        results.append(pool.prefill(starts, sequences.lens))
    assert_attended(*results, starts, sequences.lens, spec)


def check_decode(sequences: Sequences, spec: AttentionSpec = PLAIN) -> None:
    results = []
    for pool in pools(sequences, spec):
        pool.fill()
        results.append(pool.decode(sequences.lens))
    assert_attended(*results, [n - 1 for n in sequences.lens], sequences.lens, spec)


def each_alone(pool: Pool, starts: Sequence[int], ends: Sequence[int]) -> Tensor:
    """What every token from starts[i] to ends[i] of each sequence i gets as a decode of its own, when all of them are written."""
    rows = range(len(starts))
    pool.fill(starts)
    q = pool.write_span(rows, starts, ends)
    pool.forget(rows, starts)
    places = [(i, position) for i in rows for position in range(starts[i], ends[i])]
    return torch.cat([pool.attend(1, q[j : j + 1], [i], [n], [n + 1]) for j, (i, n) in enumerate(places)])


# ---- what they compute


@every_package
@both_dtypes
@pytest.mark.parametrize("heads", [Heads(2, 1, 16), Heads(2, 3, 32)], ids=str)
def test_prefill_at_the_edges_of_blocks(package: str, heads: Heads, dtype: torch.dtype) -> None:
    with installed(package, exact=True):
        check_prefill(Sequences(heads, BLOCK, EDGES, dtype), [0] * len(EDGES))


@every_package
@both_dtypes
def test_prefill_with_history(package: str, dtype: torch.dtype) -> None:
    sequences = Sequences(Heads(2, 2, 16), BLOCK, [2, 300, 300, 257, 256, 90], dtype)
    with installed(package, exact=True):
        check_prefill(sequences, [1, 299, 256, 255, 1, 0])


@every_package
@pytest.mark.parametrize("heads", [Heads(2, 1, 16), Heads(1, 4, 16)], ids=str)
def test_prefill_of_a_token_each(package: str, heads: Heads) -> None:
    with installed(package, exact=True):
        check_prefill(Sequences(heads, BLOCK, [300, 1, 257]), [299, 0, 256])


@every_package
@both_dtypes
@pytest.mark.parametrize("heads", [Heads(2, 1, 16), Heads(2, 3, 32)], ids=str)
def test_decode_at_the_edges_of_blocks(package: str, heads: Heads, dtype: torch.dtype) -> None:
    with installed(package, exact=True):
        check_decode(Sequences(heads, BLOCK, EDGES, dtype))


@every_package
@both_dtypes
@pytest.mark.parametrize("asked", [{"window": 1}, {"window": 256}, {"window": 40, "soft_cap": 3.0}], ids=str)
def test_windows_and_soft_caps(package: str, asked: dict[str, Any], dtype: torch.dtype) -> None:
    with installed(package, exact=True):
        heeded = backend_of().features
        spec = AttentionSpec(1.0, **{name: value for name, value in asked.items() if name in heeded})
        sequences = Sequences(Heads(2, 2, 16), BLOCK, [2, 40, 300, 257, 256, 520], dtype)
        check_prefill(sequences, [1, 0, 299, 100, 1, 280], spec)
        check_decode(sequences, spec)


@pytest.mark.parametrize(
    ("package", "features"),
    [
        ("flash_attn_2", {"window", "soft_cap"}),
        ("flash_attn_3", {"window", "soft_cap"}),
    ],
)
def test_what_is_not_heeded_is_refused_by_name(package: str, features: set[str]) -> None:
    asked: dict[str, Any] = {"window": 8, "sinks": True, "soft_cap": 2.0}
    model, name = replace(TOY, head_dim=16), package.removesuffix("_2").removesuffix("_3")
    with installed(package):
        for feature, value in asked.items():
            specs = [AttentionSpec(0.5, **{feature: value})]
            if feature in features:
                assert choose_backend(name, CPU, torch.bfloat16, model, BLOCK, specs)[0].name == name
            else:
                with pytest.raises(
                    InvalidConfig, match=f"{name}: it has no {feature}, and .* asks for {feature}={value}"
                ):
                    choose_backend(name, CPU, torch.bfloat16, model, BLOCK, specs)


@every_package
@both_dtypes
@pytest.mark.parametrize("counts", [[3, 3, 3, 3], [1, 4, 2, 17]], ids=["as many", "ragged"])
@pytest.mark.parametrize(("heads", "window"), [(Heads(2, 1, 16), None), (Heads(1, 3, 16), None), (Heads(2, 2, 16), 40)])
def test_several_tokens_are_decoded_as_each_alone(
    package: str, heads: Heads, window: int | None, counts: list[int], dtype: torch.dtype
) -> None:
    """The first sequence has no other tokens; the next ones end before, at and after the end of a block."""
    lens = [counts[0], 255, 257, 300]
    starts = [n - count for n, count in zip(lens, counts, strict=True)]
    spec = AttentionSpec(1.0, window=window)
    with installed(package, exact=True):
        ours, exact = pools(Sequences(heads, BLOCK, lens, dtype), spec)
        ours.fill(starts)
        assert_attended(ours.mixed(len(lens), starts, lens), each_alone(exact, starts, lens), starts, lens, spec)


@every_package
def test_decodes_of_several_tokens_before_chunks(package: str) -> None:
    lens, starts = [5, 300, 40, 260], [3, 296, 0, 200]
    with installed(package, exact=True):
        ours, exact = pools(Sequences(Heads(1, 2, 16), BLOCK, lens))
        ours.fill(starts)
        assert_attended(ours.mixed(2, starts, lens), each_alone(exact, starts, lens), starts, lens)


@every_package
def test_bounds_of_the_numbers_of_tokens_will_do(package: str) -> None:
    """The host knows no more of a recorded step."""
    lens, starts = [5, 300, 257], [4, 297, 254]
    with installed(package, exact=True):
        pool, _ = pools(Sequences(Heads(1, 2, 16), BLOCK, lens))
        pool.fill(starts)
        q = pool.write_span([0, 1, 2], starts, lens)
        metadata, spec = pool.metadata(3, [0, 1, 2], starts, lens), AttentionSpec(0.3)
        known = pool.backend.attend(q, pool.k_cache, pool.v_cache, metadata, spec)
        bounded = replace(metadata, query_lens_list=[4, 4, 4], seq_lens_list=[512, 512, 512])
        assert torch.equal(pool.backend.attend(q, pool.k_cache, pool.v_cache, bounded, spec), known)


@every_package
@FAST
@given(
    st.lists(st.tuples(st.integers(1, 560), st.floats(0, 0.99)), min_size=1, max_size=4),
    st.none() | st.integers(1, 400),
    st.integers(0, 99),
)
def test_any_batch(package: str, lens: list[tuple[int, float]], window: int | None, seed: int) -> None:
    spec = AttentionSpec(1.0, window=window)
    sequences = Sequences(Heads(1, 2, 8), BLOCK, [n for n, _ in lens], seed=seed)
    with installed(package, exact=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attn, "triton_unsupported_reason", lambda _: "it is slow")
        check_prefill(sequences, [int(n * part) for n, part in lens], spec)
        check_decode(sequences, spec)


@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_version_3_takes_any_block_size(block_size: int) -> None:
    with installed("flash_attn_3", exact=True):
        sequences = Sequences(Heads(2, 2, 16), block_size, [1, 15, 16, 17, 40])
        check_prefill(sequences, [0, 0, 3, 16, 30])
        check_decode(sequences)


@every_package
@pytest.mark.parametrize("heads", [Heads(2, 1, 16), Heads(1, 4, 16)], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_padding_are_finite_and_change_nothing(package: str, count: int, heads: Heads) -> None:
    sequences, starts = Sequences(heads, BLOCK, [5, 300]), [5 - count, 300 - count]
    with installed(package, exact=True):
        pool, _ = pools(sequences)
        pool.fill(starts)
        q = pool.write_span([0, 1], starts, [5, 300])
        metadata, spec = pool.metadata(2, [0, 1], starts, [5, 300]), AttentionSpec(0.3)
        alone = pool.backend.attend(q, pool.k_cache, pool.v_cache, metadata, spec)
        more = F.pad(q, (0, 0, 0, 0, 0, 2 * count))
        padded = pool.backend.attend(more, pool.k_cache, pool.v_cache, pad(metadata, 2, count), spec)
    assert torch.equal(padded[: 2 * count], alone)
    assert padded.isfinite().all()


def pad(metadata: AttentionMetadata, rows: int, count: int) -> AttentionMetadata:
    """More decodes, in padding rows of so many tokens."""
    more = count * torch.arange(1, rows + 1, dtype=torch.int32) + metadata.query_start_loc[-1]
    return replace(
        metadata,
        num_decodes=metadata.num_decodes + rows,
        query_start_loc=torch.cat([metadata.query_start_loc, more]),
        seq_lens=F.pad(metadata.seq_lens, (0, rows)),
        block_tables=F.pad(metadata.block_tables, (0, 0, 0, rows)),
        query_lens_list=metadata.query_lens_list + [count] * rows,
        seq_lens_list=metadata.seq_lens_list + [0] * rows,
    )


# ---- how they compute it


@every_package
@pytest.mark.parametrize(("num_decodes", "count"), [(0, 1), (1, 1), (2, 1), (1, 3), (2, 3)])
def test_nothing_is_read_back_from_the_device(
    package: str, num_decodes: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors on the device "meta" have no content that could be read."""
    with installed(package) as functions:
        places = ["flash_attn", "flash_attn_interface"]
        for name, function in functions.items():
            for module in [sys.modules[place] for place in places if sys.modules.get(place) is not None]:
                monkeypatch.setattr(module, name, without_content(function), raising=False)
        pool, _ = pools(Sequences(Heads(2, 2, 16), BLOCK, [300, 5], torch.bfloat16))
        q, k_cache, v_cache = (x.to("meta") for x in (torch.zeros(1 + count, 4, 16), pool.k_cache, pool.v_cache))
        metadata = pool.metadata(num_decodes, [0, 1], [300 - count, 4], [300, 5])
        for name in ("query_start_loc", "seq_lens", "block_tables"):
            setattr(metadata, name, getattr(metadata, name).to("meta"))
        assert pool.backend.attend(q, k_cache, v_cache, metadata, AttentionSpec(0.3)).shape == q.shape


def without_content(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def shape_only(q: Tensor, *_: object, **__: object) -> Tensor:
        return torch.empty_like(q)

    return shape_only


def test_kv_are_written_by_the_kernel_where_triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its interpreter here; what it computes is tested elsewhere."""
    pytest.importorskip("triton", reason="Triton is made for Linux on x86-64 alone")
    written = []

    def rotate_and_write(qkv: Tensor, *arguments: object) -> Tensor:
        written.append(arguments)
        return qkv

    monkeypatch.setattr(flash_attn, "triton_unsupported_reason", lambda _: None)
    monkeypatch.setattr("nanoengine.kernels.triton.rotate_and_write.rotate_and_write", rotate_and_write)
    sequences = Sequences(Heads(1, 1, 8), BLOCK, [3])
    pool = Pool(sequences, FlashAttention(BLOCK))
    pool.fill([3])
    ((q_weight, k_weight, eps, cos, sin, k_cache, v_cache, slots),) = written
    assert (q_weight, k_weight, eps) == (pool.norms[0].weight, pool.norms[1].weight, pool.norms[0].eps)
    assert cos.shape == sin.shape == (3, 1, 4)
    assert slots.tolist() == sequences.slots(0, 0, 3)
    assert (k_cache, v_cache) == (pool.k_cache, pool.v_cache)
