"""Where the flash-attn backend runs, which version it takes, and what it asks of it.

What it computes is tested together with the other backends.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoengine.attention import flash_attn
from nanoengine.attention.flash_attn import FlashAttention
from nanoengine.core.attention import AttentionMetadata, AttentionSpec
from tests.attention.paged import Heads, Pool, Sequences
from tests.attention.stand_ins import MODULES, PACKAGES, Functions, functions_of, installed, module_of, pretend_gpu

CPU = torch.device("cpu")
HALF = torch.bfloat16
V2, V3 = PACKAGES
every_package = pytest.mark.parametrize("package", PACKAGES)


def reason_of(dtype: torch.dtype = HALF, block_size: int = 256, head_dim: int = 64) -> str:
    """Why it cannot run; empty if it can."""
    return FlashAttention.unsupported_reason(CPU, dtype, head_dim, block_size) or ""


@pytest.mark.parametrize(
    ("package", "capability", "asked", "message"),
    [
        (V2, "right", {}, ""),
        (V2, "right", {"dtype": torch.float16, "block_size": 512}, ""),
        (V3, "right", {"block_size": 16}, ""),
        (V2, None, {}, "it runs on NVIDIA GPUs, and the device is cpu"),
        (V3, (7, 5), {}, "it takes compute capability 8.0, and this GPU has 7.5"),
        (V2, "right", {"dtype": torch.float32}, "it computes in float16 or bfloat16, and dtype is float32"),
        (V2, "right", {"head_dim": 512}, "head_dim 512 is no multiple of 8 up to 256"),
        (V3, "right", {"head_dim": 96}, "head_dim 96 is no power of two, which the kernel that writes K/V takes"),
        (
            V2,
            "right",
            {"block_size": 300},
            "pages of a multiple of 256 tokens, and block_size is 300: set block_size=256",
        ),
        (V3, (8, 9), {}, "flash-attn 3 runs on compute capability 9.0 alone (Hopper), and this GPU has 8.9"),
        (V3, (10, 0), {}, "flash-attn 3 runs on compute capability 9.0 alone (Hopper), and this GPU has 10.0"),
    ],
)
def test_where_it_runs(package: str, capability: Any, asked: dict[str, Any], message: str) -> None:
    with installed(package, capability=capability):
        reason = reason_of(**asked)
    assert message in reason if message else not reason


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES.values():
        monkeypatch.setitem(sys.modules, name, None)
    assert reason_of() == "the package flash-attn is not installed"


# ---- what it asks for

Asked = list[tuple[str, tuple[int, ...], dict[str, Any]]]
"""The module and name of each function that was called, the shape of its queries, its options."""


def record(patch: pytest.MonkeyPatch, module: str, functions: Functions, asked: Asked) -> None:
    """Let a module have these functions; when they are called they do nothing, not even look at what they are given."""

    def recorder(name: str, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(q: Tensor, *_: object, **options: Any) -> Tensor:
            asked.append((f"{module}.{name}", tuple(q.shape), options))
            return torch.empty_like(q)

        call.__signature__ = inspect.signature(real)  # type: ignore[attr-defined]
        return call

    calls = {name: recorder(name, real) for name, real in functions.items()}
    patch.setitem(sys.modules, module, module_of(module, calls))


def attend(spec: AttentionSpec, num_decodes: int, query_lens: list[int], block_size: int = 256) -> None:
    """On the device "meta", where nothing can be read back."""
    lens = torch.full((len(query_lens),), 9, dtype=torch.int32)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    q, lens, starts = torch.zeros(sum(query_lens), 4, 64, device="meta"), lens.to("meta"), starts.to("meta")
    metadata = AttentionMetadata(
        starts,
        lens,
        lens[:, None],
        query_lens,
        [9] * len(query_lens),
        kv_cache=[],
        slot_mapping=lens,
        num_decodes=num_decodes,
    )
    assert FlashAttention(block_size).attend(q, q, q, metadata, spec).shape == q.shape


@pytest.mark.parametrize(
    ("capability", "block_size", "expected"),
    [((9, 0), 16, 3), ((9, 0), 256, 3), ((8, 0), 256, 2), ((10, 0), 256, 2), ((8, 6), 16, None)],
)
def test_version_3_is_preferred_where_it_runs(
    capability: tuple[int, int], block_size: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Asked = []
    pretend_gpu(monkeypatch, capability)
    for package, module in MODULES.items():
        record(monkeypatch, module, functions_of(package), asked)
    if expected is None:
        assert "flash-attn 3 runs on" in reason_of(block_size=block_size)
        assert "; flash-attn 2 reads" in reason_of(block_size=block_size)
        return
    assert not reason_of(block_size=block_size)
    attend(AttentionSpec(0.1), 1, [1], block_size)
    assert asked[0][0].startswith(MODULES[f"flash_attn_{expected}"] + ".")


@every_package
@pytest.mark.parametrize(
    ("num_decodes", "query_lens", "shapes"),
    [
        (0, [1, 3], [(4, 4, 64)]),
        (2, [1, 1], [(2, 1, 4, 64)]),
        (2, [3, 3], [(2, 3, 4, 64)]),
        (2, [3, 2], [(5, 4, 64)]),
        (1, [3, 1], [(1, 3, 4, 64), (1, 4, 64)]),
    ],
)
@pytest.mark.parametrize(
    ("spec", "window_size", "softcap"),
    [
        (AttentionSpec(0.1), (-1, -1), 0.0),
        (AttentionSpec(0.1, window=1), (0, 0), 0.0),
        (AttentionSpec(0.1, window=4096, soft_cap=50.0), (4095, 0), 50.0),
    ],
    ids=str,
)
def test_decodes_of_one_length_are_rows_whose_sequences_are_split_and_windows_lack_the_own_token(
    package: str,
    spec: AttentionSpec,
    window_size: tuple[int, int],
    softcap: float,
    num_decodes: int,
    query_lens: list[int],
    shapes: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: Asked = []
    with installed(package) as functions:
        record(monkeypatch, MODULES[package], functions, asked)
        attend(spec, num_decodes, query_lens)
    varlen = "flash_attn_varlen_func" if package == V2 else "flash_attn_with_kvcache"
    names = [varlen if len(shape) == 3 else "flash_attn_with_kvcache" for shape in shapes]
    assert [(name.partition(".")[2], shape) for name, shape, _ in asked] == list(zip(names, shapes, strict=True))
    for _, _, options in asked:
        assert (options["window_size"], options["softcap"], options["causal"]) == (window_size, softcap, True)


def test_kv_are_written_by_the_kernel_where_triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux on x86-64 alone")
    written = []

    def rotate_and_write(qkv: Tensor, *arguments: object) -> Tensor:
        written.append(arguments)
        return qkv

    monkeypatch.setattr(flash_attn, "triton_unsupported_reason", lambda _: None)
    monkeypatch.setattr("nanoengine.kernels.triton.rotate_and_write.rotate_and_write", rotate_and_write)
    sequences = Sequences(Heads(1, 1, 8), 256, [3])
    pool = Pool(sequences, FlashAttention(256))
    pool.fill([3])
    ((q_weight, k_weight, eps, cos, sin, k_cache, v_cache, slots),) = written
    assert (q_weight, k_weight, eps) == (pool.norms[0].weight, pool.norms[1].weight, pool.norms[0].eps)
    assert cos.shape == sin.shape == (3, 1, 4)
    assert slots.tolist() == sequences.slots(0, 0, 3)
    assert (k_cache, v_cache) == (pool.k_cache, pool.v_cache)


# ---- installed, but of no use

BOTH = ("flash_attn_with_kvcache", "flash_attn_varlen_func")
NEEDED = ("block_table", "window_size", "softcap")


def source_without(function: str, missing: str) -> str:
    taken = {name: [p for p in NEEDED if (name, p) != (function, missing)] for name in BOTH}
    return "\n".join(f"def {name}(q, {', '.join(parameters)}): ..." for name, parameters in taken.items())


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("raise ImportError('undefined symbol: _ZN3c105ErrorE')", ("cannot be imported (undefined", "another torch?")),
        ("import flash_attn_2_cuda_not_there", ("cannot be imported (No module named 'flash_attn_2_cuda_not_there'",)),
        ("raise OSError('libcudart.so.12: cannot open')", ("cannot be imported (libcudart.so.12",)),
        ("", ("the module flash_attn has no flash_attn_with_kvcache with block_table",)),
        *(
            (source_without(function, missing), (f"has no {function} with {missing}: install flash-attn 2.8 or later",))
            for function in BOTH
            for missing in NEEDED
        ),
    ],
)
def test_a_package_that_is_broken_or_lacks_something_is_a_reason(
    source: str, messages: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # so that it is not left behind
    monkeypatch.delitem(sys.modules, "flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    pretend_gpu(monkeypatch, (8, 0))
    assert all(message in reason_of() for message in messages), reason_of()


@every_package
def test_stand_ins_have_the_signatures_of_the_real_functions(package: str) -> None:
    real = pytest.importorskip(MODULES[package], reason=f"{package} is not installed", exc_type=ImportError)
    for name, function in functions_of(package).items():
        theirs = inspect.signature(getattr(real, name)).parameters.values()
        ours = inspect.signature(function).parameters.values()
        assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]
