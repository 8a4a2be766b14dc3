"""The backend over flash-attn 2, with stand-ins for the package and for torch's copy: what it computes, and where it runs."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from nanoengine import LLM, SamplingParams
from nanoengine.core.attention import AttentionSpec
from nanoengine.errors import InvalidConfig
from nanoengine.kernels import flash_attn, torch_flash
from nanoengine.kernels.flash_attn import FlashAttention
from tests.kernels.attention.paged import Heads, Pool, Sequences
from tests.kernels.attention.stand_ins import CAPABILITY, MODULES, PACKAGES, functions_of, installed, pretend_gpu

CPU = torch.device("cpu")
every_package = pytest.mark.parametrize("package", PACKAGES)


@pytest.fixture(autouse=True)
def written_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes its time for every token; tests/kernels/attention/test_contract.py has it write some."""
    monkeypatch.setattr(flash_attn, "triton_unsupported_reason", lambda _: "it is slow")


def test_where_keys_start_is_worked_out_once() -> None:
    with installed("flash_attn", exact=True):
        pool = Pool(Sequences(Heads(2, 2, 8), 256, [3, 5, 300]), FlashAttention(256))
        metadata, chunks = pool.metadata(0, range(3), [0, 0, 0], [3, 5, 300]), []
        q = pool.write_span(range(3), [0, 0, 0], [3, 5, 300])
        for _ in range(2):
            pool.backend.attend(q, pool.kv, metadata, AttentionSpec(0.3))
            assert metadata.chunks is not None
            chunks.append(metadata.chunks.plan)
    assert chunks[0].tolist() == [0, 3, 8, 308]
    assert chunks[0] is chunks[1]


def reason(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, block_size: int = 256) -> str:
    """Why it cannot run; empty if it can."""
    return FlashAttention.unsupported_reason(CPU, dtype, head_dim, block_size) or ""


@pytest.mark.parametrize(
    ("capability", "asked", "said"),
    [
        (CAPABILITY, {}, ""),
        (CAPABILITY, {"dtype": torch.float16, "head_dim": 128, "block_size": 512}, ""),
        (CAPABILITY, {"dtype": torch.float32}, "it computes in float16 or bfloat16, and dtype is float32"),
        (CAPABILITY, {"head_dim": 4}, "head_dim 4 is no multiple of 8 up to 256"),
        (CAPABILITY, {"head_dim": 512}, "head_dim 512 is no multiple of 8 up to 256"),
        (CAPABILITY, {"block_size": 128}, "pages of a multiple of 256 tokens, and block_size is 128: leave it out"),
        (None, {}, "the device is cpu"),
        ((7, 5), {}, "it takes compute capability 8.0"),
    ],
    ids=str,
)
@every_package
def test_where_it_runs(package: str, capability: Any, asked: dict[str, Any], said: str) -> None:
    with installed(package, capability=capability):
        assert said in reason(**asked) if said else not reason(**asked)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('undefined symbol: _ZN3c105ErrorE')", "undefined symbol: _ZN3c105ErrorE"),
        ("raise OSError('libcudart.so.12: cannot open')", "libcudart.so.12: cannot open"),
        ("", "not of version 2"),  # another package has a folder of that name
        (None, "import of flash_attn halted"),
    ],
)
def test_torch_computes_without_the_package_if_it_can(
    source: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text(source or "")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # so that it is not left behind
    if source is not None:
        monkeypatch.delitem(sys.modules, "flash_attn")
    pretend_gpu(monkeypatch, CAPABILITY)
    monkeypatch.setattr(torch_flash, "LEAST", TorchVersion("99.1"))
    assert reason().startswith("the package flash-attn")
    assert said in reason()
    assert reason().endswith(f", and torch {torch.__version__} has no copy of it; 99.1 has one")
    monkeypatch.setattr(torch_flash, "LEAST", TorchVersion("0"))
    assert not reason()
    assert FlashAttention(256).functions is torch_flash


@every_package
def test_stand_ins_have_the_signatures_of_the_real_functions(package: str) -> None:
    if package == "torch_flash" and (why_not := torch_flash.unsupported_reason()):
        pytest.skip(why_not)
    real = pytest.importorskip(MODULES[package], reason="flash-attn is not installed", exc_type=ImportError)
    for name, function in functions_of(package).items():
        theirs = inspect.signature(getattr(real, name)).parameters.values()
        ours = inspect.signature(function).parameters.values()
        assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


def test_kv_are_written_by_the_kernel_where_triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux on x86-64 alone")
    written = []

    def rotate_and_write(qkv: Tensor, *arguments: object) -> Tensor:
        written.append(arguments)
        return qkv

    monkeypatch.setattr(flash_attn, "triton_unsupported_reason", lambda _: None)
    monkeypatch.setattr("nanoengine.kernels.triton.attention.rotate_and_write.rotate_and_write", rotate_and_write)
    sequences = Sequences(Heads(1, 1, 8), 256, [3])
    with installed("flash_attn"):
        pool = Pool(sequences, FlashAttention(256))
    pool.fill([3])
    (((q_weight, k_weight, eps, cos, sin), kv, slots),) = written
    assert (q_weight, k_weight, eps) == (pool.norms[0].weight, pool.norms[1].weight, pool.norms[0].eps)
    assert cos.shape == sin.shape == (3, 1, 4)
    assert slots.tolist() == sequences.slots(0, 0, 3)
    assert kv == pool.kv


@every_package
def test_an_engine_over_it_says_what_plain_torch_says_in_blocks_as_it_reads_them(package: str) -> None:
    prompts, params = [[5, 6, 7] * 20, [9] * 258], SamplingParams(temperature=0.0, max_tokens=3)

    def answers(name: str, **options: Any) -> tuple[int, list[list[int]]]:
        options |= {"dtype": "float32", "max_model_len": 320, "num_kv_blocks": 100, "enforce_eager": True}
        with LLM("demo", kernels="torch", attention_backend=name, use_tqdm=False, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return llm.engine.scheduler.blocks.block_size, [output.outputs[0].token_ids for output in outputs]

    size, expected = answers("torch")
    with installed(package, exact=True):
        assert (size, answers("flash_attn")) == (16, (256, expected))
        with pytest.raises(InvalidConfig, match=r"flash_attn.*block_size is 16: leave it out"):
            answers("flash_attn", block_size=16)
