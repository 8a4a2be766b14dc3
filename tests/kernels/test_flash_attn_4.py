"""flash-attn 4 for long runs: what it is asked, with a stand-in; which kernels it needs, and that they compile."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoengine.core.attention import AttentionSpec
from nanoengine.kernels import flash_attn_4
from nanoengine.kernels.flash_attn_4 import Kernel, kernels_of, prepare
from nanoengine.models.architectures import read_model_config
from tests.kernels.attention.every_backend import TRITON, running
from tests.kernels.attention.paged import Heads, Pool, Sequences, assert_attended
from tests.kernels.attention.stand_ins import attend, integers, lengths

HOPPER = (9, 0)
WINDOWED = AttentionSpec(0.3, 8)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    page_table: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    learnable_sink: Tensor | None,
    softcap: float,
) -> Tensor:
    """Attention by its definition."""
    query_lens = lengths(cu_seqlens_q, len(q), len(page_table), max_seqlen_q)
    seq_lens = integers(seqused_k, len(page_table))
    assert page_table.dtype == torch.int32
    assert max_seqlen_k >= max(seq_lens)
    where = query_lens, seq_lens, page_table, softmax_scale, causal
    return attend(q, k, v, *where, (-1, -1), softcap, learnable_sink)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of the steps that a stand-in computes."""
    lengths = []

    def computed(q: Tensor, *tensors: Tensor, **how: Any) -> Tensor:
        lengths.append(len(q))
        return flash_attn_varlen_func(q, *tensors, **how)

    monkeypatch.setattr(flash_attn_4, "functions", lambda: SimpleNamespace(flash_attn_varlen_func=computed))
    monkeypatch.setattr(flash_attn_4, "LEAST_TOKENS", 1)
    return lengths


@pytest.mark.parametrize("seed", range(12))
def test_prompts_are_attention_by_its_definition(asked: list[int], seed: int) -> None:
    """The first is long enough; others may be short. Some are chunks, and the host may know no more than bounds."""
    rng = random.Random(seed)
    ends = [rng.randint(20, 70), *(rng.randint(1, 40) for _ in range(rng.randrange(3)))]
    starts = [rng.randrange(ends[0] - 12), *(rng.randrange(end) for end in ends[1:])]
    spec = AttentionSpec(0.3, sinks=rng.random() < 0.5, soft_cap=rng.choice([None, 2.0]))
    heads = Heads(rng.randint(1, 2), rng.randint(1, 3), 16)
    with running(TRITON) as backend_of:
        backend: Any = backend_of(16)
        backend.flash_prompt = 10
        pool = Pool(Sequences(heads, 16, ends, seed=seed), backend, norms=False, rotated=False, spec=spec)
        pool.fill(starts)
        q, rows = pool.write_span(range(len(ends)), starts, ends), range(len(ends))
        metadata, count = pool.metadata(0, rows, starts, ends), len(q)
        if rng.random() < 0.5:
            metadata = replace(metadata, seq_lens_list=[n + 9 for n in metadata.seq_lens_list])
        out = backend.attend(q, pool.kv, metadata, spec, pool.sinks)
        assert_attended(out, pool.exact(starts, ends))
        assert asked == [count]


def test_others_are_computed_by_triton(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that are short, of windows, int8, or too many."""
    monkeypatch.setattr(flash_attn_4, "MOST_RUNS", 1)
    with running(TRITON) as backend_of:
        for lens, how in (([9], {}), ([20, 20], {}), ([20], {"quantized": True}), ([20], {"spec": WINDOWED})):
            backend: Any = backend_of(16)
            backend.flash_prompt = 10
            pool = Pool(Sequences(Heads(1, 1, 16), 16, lens), backend, norms=False, rotated=False, **how)
            pool.step(0, [0] * len(lens), lens)
    assert not asked


def test_a_model_needs_a_kernel_for_each_kind_of_layer() -> None:
    facts = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_attention_heads": 8, "head_dim": 64}
    facts |= {"num_key_value_heads": 2, "num_hidden_layers": 4, "intermediate_size": 64, "vocab_size": 100}
    model = read_model_config(facts | {"rms_norm_eps": 1e-6, "max_position_embeddings": 100})
    capped, sunk = AttentionSpec(0.1, soft_cap=5.0), AttentionSpec(0.2, sinks=True)
    assert kernels_of(model, torch.bfloat16, [sunk, WINDOWED, capped, replace(sunk, scale=0.3)]) == [
        Kernel(64, 4, "bfloat16", soft_cap=5.0),
        Kernel(64, 4, "bfloat16", sinks=True),
    ]


def test_kernels_that_are_missing_are_compiled_by_another_process_for_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu, started, imported = torch.device("cuda"), [], []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("FLASH_ATTENTION_ARCH", "CUTE_DSL_ARCH", "FLASH_ATTENTION_NUM_SMS"):
        monkeypatch.setenv(name, "")  # so that what is set is not left behind
    monkeypatch.setattr(flash_attn_4, "version", lambda _: "1.0")
    monkeypatch.setattr(flash_attn_4, "functions", lambda: imported.append(1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: HOPPER)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(flash_attn_4.subprocess, "Popen", lambda command, **_: started.append(command))
    kernels = [Kernel(64, 4, "bfloat16"), Kernel(64, 4, "bfloat16", sinks=True)]
    assert prepare(kernels, gpu) == "2 of its kernels are being compiled, for the next start"
    monkeypatch.setattr(flash_attn_4, "attend", lambda *_: imported.clear())
    flash_attn_4.main(started[0][-1])  # as that process does
    assert prepare(kernels, gpu) is None
    assert len(started) == len(imported) == 1
    assert prepare([Kernel(64, 4, "float32")], gpu) == "it computes in float16 or bfloat16, and dtype is float32"
    assert "is no multiple of 8" in str(prepare([Kernel(100, 4, "bfloat16")], gpu))


def test_without_the_package_a_start_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(flash_attn_4, "version", missing)
    said = str(prepare([Kernel(64, 4, "bfloat16")], torch.device("cuda")))
    assert said == "the package is not installed: pip install 'nanoengine[flash-attn-4]'"


@pytest.mark.parametrize(
    "kernel",
    [
        Kernel(64, 8, "bfloat16", sinks=True),
        Kernel(96, 1, "float16"),
        Kernel(128, 2, "bfloat16"),
        Kernel(256, 2, "bfloat16", soft_cap=50.0),
    ],
    ids=str,
)
def test_its_kernels_compile_without_a_gpu(kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another process: its choices of GPU and folder hold for all of a process."""
    pytest.importorskip("flash_attn.cute", reason="flash-attn 4 is not installed", exc_type=ImportError)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = {"capability": HOPPER, "multiprocessors": 132, "kernels": [asdict(kernel)]}
    subprocess.run([sys.executable, "-m", flash_attn_4.__name__, json.dumps(target)], check=True, capture_output=True)
    compiled = list(tmp_path.rglob("*.o"))
    assert len(compiled) == 1
    assert compiled[0].stat().st_size > 10_000
    assert len(list(tmp_path.rglob(flash_attn_4._mark(kernel, 9).name))) == 1
