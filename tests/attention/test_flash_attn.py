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
from tests.attention.stand_ins import MODULES, PACKAGES, functions_of, installed, module_of, pretend_gpu

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
        (V3, "right", {"block_size": 16}, ""),
        (V3, (7, 5), {}, "it takes compute capability 8.0, and this GPU has 7.5"),
        (V3, "right", {"head_dim": 96}, "head_dim 96 is no power of two, which the kernel that writes K/V takes"),
        (V3, (8, 9), {}, "flash-attn 3 runs on compute capability 9.0 alone (Hopper), and this GPU has 8.9"),
        (V3, (10, 0), {}, "flash-attn 3 runs on compute capability 9.0 alone (Hopper), and this GPU has 10.0"),
    ],
)
def test_where_it_runs(package: str, capability: Any, asked: dict[str, Any], message: str) -> None:
    """What tests/core/test_flash_attention.py does not say."""
    with installed(package, capability=capability):
        reason = reason_of(**asked)
    assert message in reason if message else not reason


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES.values():
        monkeypatch.setitem(sys.modules, name, None)
    assert reason_of() == "the package flash-attn is not installed"


# ---- what it asks for


@pytest.mark.parametrize(
    ("capability", "block_size", "expected"),
    [((9, 0), 16, V3), ((9, 0), 256, V3), ((8, 0), 256, V2), ((10, 0), 256, V2), ((8, 6), 16, None)],
)
def test_version_3_is_preferred_where_it_runs(
    capability: tuple[int, int], block_size: int, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen by who is asked for two decodes and a chunk on the device "meta", where nothing can be read back."""
    asked: list[tuple[str, tuple[int, ...]]] = []

    def recorder(package: str, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(q: Tensor, *_: object, **__: object) -> Tensor:
            asked.append((package, tuple(q.shape)))
            return torch.empty_like(q)

        call.__signature__ = inspect.signature(real)  # type: ignore[attr-defined]
        return call

    pretend_gpu(monkeypatch, capability)
    for package, module in MODULES.items():
        calls = {name: recorder(package, real) for name, real in functions_of(package).items()}
        monkeypatch.setitem(sys.modules, module, module_of(module, calls))
    if expected is None:
        assert "flash-attn 3 runs on" in reason_of(block_size=block_size)
        assert "; flash-attn 2 reads" in reason_of(block_size=block_size)
        return
    assert not reason_of(block_size=block_size)
    with torch.device("meta"):
        q, lens, starts = torch.zeros(9, 4, 64), torch.zeros(3).int(), torch.zeros(4).int()
    how: dict[str, Any] = {"kv_cache": [], "slot_mapping": lens, "num_decodes": 2}
    metadata = AttentionMetadata(starts, lens, lens[:, None], [3, 3, 3], [9] * 3, **how)
    assert FlashAttention(block_size).attend(q, (q, q), metadata, AttentionSpec(0.1)).shape == q.shape
    assert asked == [(expected, (2, 3, 4, 64)), (expected, (3, 4, 64))], "decodes of one length are rows"


def test_a_window_is_counted_without_the_own_token() -> None:
    for asked, window, cap in (({}, (-1, -1), 0.0), ({"window": 1}, (0, 0), 0.0), ({"soft_cap": 50.0}, (-1, -1), 50.0)):
        options = FlashAttention(256).options(AttentionSpec(0.1, **asked))  # type: ignore[arg-type]
        assert (options["window_size"], options["softcap"], options["causal"]) == (window, cap, True)


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
    (((q_weight, k_weight, eps, cos, sin), kv, slots),) = written
    assert (q_weight, k_weight, eps) == (pool.norms[0].weight, pool.norms[1].weight, pool.norms[0].eps)
    assert cos.shape == sin.shape == (3, 1, 4)
    assert slots.tolist() == sequences.slots(0, 0, 3)
    assert kv == pool.kv


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
