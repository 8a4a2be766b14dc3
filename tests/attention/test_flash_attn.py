"""Where the flash-attn backend runs, which version it takes, and whether the stand-ins are like the real packages.

What it computes is tested together with the other backends of its layout.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoengine.attention.flash_attn import FlashAttention
from nanoengine.core.attention import AttentionMetadata, AttentionSpec
from tests.attention import stand_ins
from tests.attention.stand_ins import installed, module_of, pretend_gpu

CPU = torch.device("cpu")


def unsupported_reason(dtype: torch.dtype = torch.bfloat16, block_size: int = 256, head_dim: int = 64) -> str:
    reason = FlashAttention.unsupported_reason(CPU, dtype, head_dim, block_size)
    assert reason is not None
    return reason


# ---- where it runs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("package", "block_size"), [("flash_attn_2", 256), ("flash_attn_2", 512), ("flash_attn_3", 16)]
)
def test_it_runs_in_half_precision(package: str, block_size: int, dtype: torch.dtype) -> None:
    with installed(package):
        assert FlashAttention.unsupported_reason(CPU, dtype, 64, block_size) is None


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    assert unsupported_reason() == "the package flash-attn is not installed"


@pytest.mark.parametrize("package", ["flash_attn_2", "flash_attn_3"])
def test_on_a_cpu(package: str) -> None:
    with installed(package, capability=None):
        assert unsupported_reason() == "it runs on NVIDIA GPUs, and the device is cpu"


@pytest.mark.parametrize("package", ["flash_attn_2", "flash_attn_3"])
def test_on_an_old_gpu(package: str) -> None:
    with installed(package, capability=(7, 5)):
        assert unsupported_reason() == "it takes compute capability 8.0, and this GPU has 7.5"


@pytest.mark.parametrize("package", ["flash_attn_2", "flash_attn_3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_other_dtypes(package: str, dtype: torch.dtype) -> None:
    with installed(package):
        assert (
            unsupported_reason(dtype)
            == f"it computes in float16 or bfloat16, and dtype is {str(dtype).removeprefix('torch.')}"
        )


@pytest.mark.parametrize(("dim", "reason"), [(4, "multiple of 8"), (512, "up to 256"), (96, "power of two")])
def test_with_other_heads(dim: int, reason: str) -> None:
    with installed("flash_attn_2"):
        found = unsupported_reason(head_dim=dim)
    assert f"head_dim {dim}" in found
    assert reason in found


@pytest.mark.parametrize("block_size", [16, 128, 300])
def test_version_2_with_other_blocks(block_size: int) -> None:
    with installed("flash_attn_2"):
        assert unsupported_reason(block_size=block_size) == (
            f"flash-attn 2 reads K/V in pages of a multiple of 256 tokens, and block_size is {block_size}: "
            "set block_size=256, or use another backend"
        )


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_version_3_on_other_gpus(capability: tuple[int, int]) -> None:
    with installed("flash_attn_3", capability=capability):
        assert unsupported_reason() == (
            f"flash-attn 3 runs on compute capability 9.0 alone (Hopper), and this GPU has {capability[0]}.{capability[1]}"
        )


# ---- which version


class Called(Exception):
    """By its argument."""


def caller(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*_: Any, **__: Any) -> Tensor:
        raise Called(name)

    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return call


@pytest.mark.parametrize(
    ("capability", "block_size", "expected"),
    [
        ((9, 0), 16, "version 3"),
        ((9, 0), 256, "version 3"),
        ((8, 0), 256, "version 2"),
        ((10, 0), 256, "version 2"),
        ((8, 6), 16, None),
    ],
)
def test_version_3_is_preferred_where_it_runs(
    capability: tuple[int, int], block_size: int, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, capability)
    for version, name, functions in (
        ("version 2", "flash_attn", stand_ins.version_2_functions()),
        ("version 3", "flash_attn_interface", stand_ins.version_3_functions()),
    ):
        calls = {key: caller(version, function) for key, function in functions.items()}
        monkeypatch.setitem(sys.modules, name, module_of(name, calls))
    reason = FlashAttention.unsupported_reason(CPU, torch.bfloat16, 64, block_size)
    if expected is None:
        assert reason is not None
        assert "flash-attn 3 runs on" in reason
        assert "; flash-attn 2 reads" in reason
        return
    assert reason is None
    q, one = torch.zeros(1, 1, 64), torch.ones(1, dtype=torch.int32)
    metadata = AttentionMetadata([], one, 1, torch.tensor([0, 1]), one, one[None], [1], [1])
    with pytest.raises(Called, match=expected):
        FlashAttention(block_size).attend(q, q, q, metadata, AttentionSpec(0.1))


# ---- what it asks for


@pytest.mark.parametrize("package", ["flash_attn_2", "flash_attn_3"])
@pytest.mark.parametrize("num_decodes", [0, 1])
@pytest.mark.parametrize(
    ("spec", "window_size", "softcap"),
    [
        (AttentionSpec(0.1), (-1, -1), 0.0),
        (AttentionSpec(0.1, window=1), (0, 0), 0.0),
        (AttentionSpec(0.1, window=4096, soft_cap=50.0), (4095, 0), 50.0),
    ],
    ids=str,
)
def test_a_window_is_asked_for_without_the_querys_own_token(
    package: str,
    num_decodes: int,
    spec: AttentionSpec,
    window_size: tuple[int, int],
    softcap: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    with installed(package) as functions:
        module = sys.modules[{"flash_attn_2": "flash_attn", "flash_attn_3": "flash_attn_interface"}[package]]
        for name, function in functions.items():
            monkeypatch.setattr(module, name, recorder(asked, function))
        q, one = torch.zeros(1, 1, 64), torch.ones(1, dtype=torch.int32)
        metadata = AttentionMetadata([], one, num_decodes, torch.tensor([0, 1]), one, one[None], [1], [1])
        FlashAttention(256).attend(q, q, q, metadata, spec)
    (options,) = asked
    assert (options["window_size"], options["softcap"], options["causal"]) == (window_size, softcap, True)


def recorder(asked: list[dict[str, Any]], function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def record(q: Tensor, *_: object, **options: Any) -> Tensor:
        asked.append(options)
        return q

    record.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return record


@pytest.mark.parametrize(
    ("package", "query_lens", "function", "shape"),
    [
        ("flash_attn_2", [1, 1], "flash_attn_with_kvcache", (2, 1, 4, 64)),
        ("flash_attn_3", [1, 1], "flash_attn_with_kvcache", (2, 1, 4, 64)),
        ("flash_attn_2", [3, 3], "flash_attn_with_kvcache", (2, 3, 4, 64)),
        ("flash_attn_3", [3, 3], "flash_attn_with_kvcache", (2, 3, 4, 64)),
        ("flash_attn_2", [3, 2], "flash_attn_varlen_func", (5, 4, 64)),
        ("flash_attn_3", [3, 2], "flash_attn_with_kvcache", (5, 4, 64)),
    ],
)
def test_decodes_of_one_length_are_asked_for_as_rows_whose_sequences_are_split(
    package: str,
    query_lens: list[int],
    function: str,
    shape: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, tuple[int, ...]]] = []
    with installed(package) as functions:
        module = sys.modules[{"flash_attn_2": "flash_attn", "flash_attn_3": "flash_attn_interface"}[package]]
        for name, real in functions.items():

            def record(q: Tensor, *_: object, name: str = name, **__: object) -> Tensor:
                asked.append((name, tuple(q.shape)))
                return q

            record.__signature__ = inspect.signature(real)  # type: ignore[attr-defined]
            monkeypatch.setattr(module, name, record)
        starts = torch.tensor([0, query_lens[0], sum(query_lens)], dtype=torch.int32)
        q, lens = torch.zeros(sum(query_lens), 4, 64), torch.tensor([9, 9], dtype=torch.int32)
        metadata = AttentionMetadata([], lens, 2, starts, lens, lens[:, None], query_lens, [9, 9])
        assert FlashAttention(256).attend(q, q, q, metadata, AttentionSpec(0.1)).shape == q.shape
    assert asked == [(function, shape)]


# ---- installed, but of no use


def packages(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `flash_attn` be a package of this source."""
    (folder / "flash_attn").mkdir()
    (folder / "flash_attn" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # so that it is not left behind
    monkeypatch.delitem(sys.modules, "flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    pretend_gpu(monkeypatch, (8, 0))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorE')",
            "undefined symbol: _ZN3c105ErrorE",
        ),
        ("import flash_attn_2_cuda_that_is_not_there", "No module named 'flash_attn_2_cuda_that_is_not_there'"),
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12"),
    ],
)
def test_a_broken_package_is_a_reason(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages(tmp_path, source, monkeypatch)
    found = unsupported_reason()
    assert found.startswith("flash-attn 2 is installed, but cannot be imported (")
    assert message in found
    assert "another torch?" in found


@pytest.mark.parametrize("source", ["", "def flash_attn_varlen_func(q): ...\ndef flash_attn_with_kvcache(q): ..."])
def test_a_package_without_paged_attention_is_a_reason(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages(tmp_path, source, monkeypatch)
    found = unsupported_reason()
    assert "the module flash_attn has no flash_attn_with_kvcache with block_table" in found
    assert "install flash-attn 2.8 or later" in found


@pytest.mark.parametrize("missing", ["block_table", "window_size", "softcap"])
@pytest.mark.parametrize("lacking", ["flash_attn_with_kvcache", "flash_attn_varlen_func"])
def test_a_package_that_lacks_what_layers_ask_for_is_a_reason(
    missing: str, lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_of_them = ("block_table", "window_size", "softcap")
    takes = {name: ", ".join(all_of_them) for name in ("flash_attn_with_kvcache", "flash_attn_varlen_func")}
    takes[lacking] = ", ".join(name for name in all_of_them if name != missing)
    source = "\n".join(f"def {name}(q, {parameters}): ..." for name, parameters in takes.items())
    packages(tmp_path, source, monkeypatch)
    assert (
        f"the module flash_attn has no {lacking} with {missing}: install flash-attn 2.8 or later"
        in unsupported_reason()
    )


# ---- the stand-ins


@pytest.mark.parametrize(
    ("module", "functions"),
    [
        ("flash_attn", stand_ins.version_2_functions()),
        ("flash_attn_interface", stand_ins.version_3_functions()),
    ],
)
def test_stand_ins_have_the_signatures_of_the_real_functions(module: str, functions: stand_ins.Functions) -> None:
    real = pytest.importorskip(module, reason=f"{module} is not installed", exc_type=ImportError)
    for name, function in functions.items():
        assert signature(function) == signature(getattr(real, name))


def signature(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def arguments() -> dict[str, Any]:
    """A prefill that version 2 takes: 3 and 2 queries, of sequences of 300 and 2 tokens."""
    return {
        "q": torch.randn(5, 4, 16).half(),
        "k": torch.randn(4, 256, 2, 16).half(),
        "v": torch.randn(4, 256, 2, 16).half(),
        "cu_seqlens_q": torch.tensor([0, 3, 5], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 300, 302], dtype=torch.int32),
        "max_seqlen_q": 3,
        "max_seqlen_k": 300,
        "softmax_scale": 0.25,
        "causal": True,
        "block_table": torch.tensor([[2, 3], [1, 0]], dtype=torch.int32),
    }


def test_the_stand_in_takes_what_is_right() -> None:
    assert stand_ins.version_2_functions()["flash_attn_varlen_func"](**arguments()).shape == (5, 4, 16)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", torch.randn(5, 4, 16), "only support fp16 and bf16"),
        ("q", torch.randn(5, 4, 16).bfloat16(), "the same dtype"),
        ("q", torch.randn(5, 3, 16).half(), "must divide number of heads"),
        ("q", torch.randn(5, 16, 4).half().transpose(1, 2), "contiguous last dimension"),
        ("q", torch.randn(6, 4, 16).half(), "are not of 6 rows"),
        ("k", torch.randn(4, 16, 2, 16).half(), "divisible by 256"),
        ("v", torch.randn(4, 256, 1, 16).half(), "have shapes"),
        ("cu_seqlens_q", torch.tensor([0, 3, 5]), "int32"),
        ("cu_seqlens_q", torch.tensor([3, 2], dtype=torch.int32), "shape"),
        ("cu_seqlens_k", torch.tensor([300, 2], dtype=torch.int32), "shape"),
        ("cu_seqlens_k", torch.tensor([0, 600, 602], dtype=torch.int32), "longest"),
        ("max_seqlen_q", 2, "the longest"),
        ("max_seqlen_k", torch.tensor(300), "the longest"),
        ("block_table", torch.tensor([[2, 3], [1, 0]]), "int32"),
        ("block_table", torch.tensor([[2], [1]], dtype=torch.int32), "longer than its pages"),
        ("block_table", torch.tensor([[2, 3]], dtype=torch.int32), "shape"),
        ("block_table", torch.tensor([[2, 4], [1, 0]], dtype=torch.int32), "outside of the cache"),
        ("block_table", None, "without pages"),
        ("window_size", 4, "pair of numbers"),
        ("window_size", (3.0, 0), "pair of numbers"),
        ("softcap", None, "soft cap"),
        ("dropout_p", 0.1, "dropout_p"),
        ("return_attn_probs", True, "return_attn_probs"),
    ],
)
def test_the_stand_in_refuses_what_is_wrong(name: str, value: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        stand_ins.version_2_functions()["flash_attn_varlen_func"](**arguments() | {name: value})


def test_a_stand_in_is_gone_afterwards() -> None:
    before = [FlashAttention.unsupported_reason(CPU, torch.float32, 64, 256), sys.modules.get("flash_attn")]
    with installed("flash_attn_2", exact=True):
        assert FlashAttention.unsupported_reason(CPU, torch.float32, 64, 256) is None
        assert importlib.import_module("flash_attn").flash_attn_varlen_func
    assert [
        FlashAttention.unsupported_reason(CPU, torch.float32, 64, 256),
        sys.modules.get("flash_attn"),
    ] == before
