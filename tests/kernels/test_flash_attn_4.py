"""flash-attn 4 for long runs: what it is asked, with a stand-in; which kernels it needs, and that they compile."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoengine.core.attention import AttentionSpec
from nanoengine.kernels import flash_attn_4
from nanoengine.kernels.flash_attn_4 import Kernel, attend_run, kernels_of, prepare
from nanoengine.models.architectures import read_model_config
from tests.kernels.attention.every_backend import TRITON, running
from tests.kernels.attention.paged import Heads, Pool, Sequences, assert_attended

HOPPER = (9, 0)
CHUNKED = AttentionSpec(0.3, 8, chunked=True)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int | None, int | None],
    learnable_sink: Tensor | None,
    softcap: float,
) -> tuple[Tensor, None]:
    """Attention by its definition; the diagonal ends in the bottom right corner. What is masked is multiplied by 0, NaN too."""
    assert causal
    assert q.shape[0] == k.shape[0] == v.shape[0] == 1
    assert all(x.stride(-1) == 1 and x.data_ptr() % 16 == 0 for x in (k, v))
    own = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
    seen = torch.arange(k.shape[1])
    left = len(seen) if window_size[0] is None else window_size[0]
    k, v = (x[0].double().repeat_interleave(q.shape[2] // x.shape[2], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q[0].double(), k) * softmax_scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill((seen > own) | (seen < own - left), -torch.inf)
    if learnable_sink is not None:
        scores = torch.cat((scores, learnable_sink.double()[:, None, None].expand(-1, q.shape[1], 1)), 2)
    weights = scores.softmax(2)[..., : len(seen)]
    return torch.einsum("hqk,khd->qhd", weights, v)[None].to(q.dtype), None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of runs that a stand-in computes."""
    lengths = []

    def computed(q: Tensor, *tensors: Tensor, **how: Any) -> tuple[Tensor, None]:
        lengths.append(q.shape[1])
        return flash_attn_func(q, *tensors, **how)

    monkeypatch.setattr(flash_attn_4, "functions", lambda: SimpleNamespace(flash_attn_func=computed))
    monkeypatch.setattr(flash_attn_4, "LEAST_TOKENS", 1)
    return lengths


@pytest.mark.parametrize("seed", range(12))
def test_a_long_run_alone_is_attention_by_its_definition(asked: list[int], seed: int) -> None:
    """What no query sees is NaN, and its blocks are in no table."""
    rng = random.Random(seed)
    end = rng.randint(20, 70)
    start = rng.choice([0, rng.randrange(end - 12)])
    window = rng.choice([None, rng.randint(1, 40)])
    spec = AttentionSpec(0.3, window, sinks=rng.random() < 0.5, soft_cap=rng.choice([None, 2.0]))
    heads = Heads(rng.randint(1, 2), rng.randint(1, 3), 16)
    with running(TRITON) as backend_of:
        backend: Any = backend_of(16)
        backend.flash_prompt = 10
        pool = Pool(Sequences(heads, 16, [end], seed=seed), backend, norms=False, rotated=False, spec=spec)
        pool.fill([start])
        out = pool.step(0, [start], [end])
        assert_attended(out, pool.exact([start], [end]))
        assert asked == [end - start]


def test_others_are_computed_by_triton(asked: list[int]) -> None:
    """Runs that are short, chunked, int8, or not alone, as those of recorded steps."""
    with running(TRITON) as backend_of:
        for lens, how in (([9], {}), ([20, 20], {}), ([20], {"quantized": True}), ([20], {"spec": CHUNKED})):
            backend: Any = backend_of(16)
            backend.flash_prompt = 10
            pool = Pool(Sequences(Heads(1, 1, 16), 16, lens), backend, norms=False, rotated=False, **how)
            pool.step(0, [0] * len(lens), lens)
    assert not asked


def test_a_model_needs_a_kernel_for_each_kind_of_layer() -> None:
    facts = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_attention_heads": 8, "head_dim": 64}
    facts |= {"num_key_value_heads": 2, "num_hidden_layers": 4, "intermediate_size": 64, "vocab_size": 100}
    model = read_model_config(facts | {"rms_norm_eps": 1e-6, "max_position_embeddings": 100})
    plain, windowed = AttentionSpec(0.1), [AttentionSpec(0.2, window) for window in (4, 8)]
    assert kernels_of(model, torch.bfloat16, [plain, *windowed, CHUNKED]) == [
        Kernel(64, 4, "bfloat16"),
        Kernel(64, 4, "bfloat16", window=True),
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
    monkeypatch.setattr(flash_attn_4, "attend_run", lambda *_: imported.clear())
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
        Kernel(64, 8, "bfloat16", window=True, sinks=True),
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


@pytest.mark.usefixtures("asked")
def test_a_run_is_of_its_last_tokens() -> None:
    """Blocks lie anywhere, and a table may be longer than the sequence."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 9, 16, 1, 16)
    q, table = torch.randn(5, 2, 16), torch.tensor([7, 2, 4, 1 << 30], dtype=torch.int32)
    out = attend_run(q, (k, v), table, 37, AttentionSpec(0.25), None)
    rows = [x[[7, 2, 4]].flatten(0, 1)[None, :37] for x in (k, v)]
    how = {"softmax_scale": 0.25, "causal": True, "window_size": (None, None), "learnable_sink": None, "softcap": 0.0}
    torch.testing.assert_close(out, flash_attn_func(q[None], *rows, **how)[0][0])  # type: ignore[arg-type]
