"""The backend over flash-attn 2, with a stand-in for the package, against attention in plain torch; and where it runs."""

from __future__ import annotations

import sys

import pytest
import torch

from nanoengine.core.flash_attention import FlashAttention
from tests.attention.stand_ins import installed
from tests.core.paged_attention import HEAD_DIM, PLAIN, Paged, assert_equal

CPU = torch.device("cpu")
BLOCK = 256


def check(num_decodes: int, starts: list[int], ends: list[int]) -> None:
    with installed("flash_attn_2", exact=True):
        paged = Paged(ends, BLOCK, backend=FlashAttention)
        if any(starts):
            paged.write([0] * len(starts), starts)
        assert_equal(*paged.mixed(num_decodes, starts, ends))


def test_prefill_at_the_edges_of_blocks_with_and_without_history() -> None:
    check(0, [0, 0, 0, 0], [1, 255, 256, 257])
    check(0, [299, 100, 1, 0], [300, 257, 256, 90])


def test_decode_at_the_edges_of_blocks() -> None:
    lens = [1, 255, 256, 257, 515]
    check(len(lens), [n - 1 for n in lens], lens)


@pytest.mark.parametrize("counts", [[3, 3, 3], [1, 4, 2]], ids=["as many", "ragged"])
def test_decodes_of_several_tokens_and_chunks_in_one_step(counts: list[int]) -> None:
    lens = [5, 257, 300]
    check(2, [n - count for n, count in zip(lens, counts, strict=True)], lens)


def test_the_function_of_decodes_is_asked_where_they_have_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed("flash_attn_2", exact=True) as functions:
        called = []
        for name, function in functions.items():

            def note(*arguments: object, name: str = name, **options: object) -> torch.Tensor:
                called.append(name)
                return functions[name](*arguments, **options)

            monkeypatch.setattr(sys.modules["flash_attn"], name, note)
            assert callable(function)
        for starts in ([0, 0], [8, 3], [7, 3]):
            paged = Paged([9, 4], BLOCK, backend=FlashAttention)
            paged.write([0, 0], starts)
            paged.mixed(2 if any(starts) else 0, starts, [9, 4])
    assert called == ["flash_attn_varlen_func", "flash_attn_with_kvcache", "flash_attn_varlen_func"]


def test_where_keys_start_is_worked_out_once() -> None:
    with installed("flash_attn_2", exact=True):
        paged = Paged([3, 5, 300], BLOCK, backend=FlashAttention)
        metadata = paged.metadata(0, [0, 0, 0], [3, 5, 300], paged.write([0, 0, 0], [3, 5, 300]))
        q, starts = torch.randn(308, 4, HEAD_DIM), []
        for _ in range(2):
            paged.backend.attend(q, paged.k_cache, paged.v_cache, metadata, PLAIN)
            assert metadata.chunks is not None
            starts.append(metadata.chunks.plan)
    assert (starts[0].tolist(), starts[0].dtype) == ([0, 3, 8, 308], torch.int32)
    assert starts[0] is starts[1]


# ---- where it runs


def reason(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, block_size: int = BLOCK) -> str | None:
    return FlashAttention.unsupported_reason(CPU, dtype, head_dim, block_size)


def test_it_runs_in_half_precision() -> None:
    with installed("flash_attn_2"):
        assert reason() is None
        assert reason(torch.float16, 128, 512) is None


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert (reason() or "").startswith("the package flash-attn is not installed")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"dtype": torch.float32}, "it computes in float16 or bfloat16, and dtype is float32"),
        ({"head_dim": 4}, "head_dim 4 is no multiple of 8 up to 256"),
        ({"head_dim": 512}, "head_dim 512 is no multiple of 8 up to 256"),
        ({"block_size": 128}, "pages of a multiple of 256 tokens, and block_size is 128: set block_size=256"),
    ],
    ids=str,
)
def test_what_it_does_not_take(asked: dict[str, int], said: str) -> None:
    with installed("flash_attn_2"):
        assert said in (reason(**asked) or "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "said"), [(None, "the device is cpu"), ((7, 5), "it takes compute capability 8.0")]
)
def test_other_devices(capability: tuple[int, int] | None, said: str) -> None:
    with installed("flash_attn_2", capability=capability):
        assert said in (reason() or "")


def test_the_scale_of_the_layer_is_passed_on() -> None:
    assert FlashAttention(BLOCK).options(PLAIN) == {"softmax_scale": PLAIN.scale, "causal": True}
