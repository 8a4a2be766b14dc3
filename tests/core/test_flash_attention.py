"""The backend over flash-attn 2, with stand-ins for the package and for torch's copy, keeps the contract of backends; and where
it runs.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from nanoengine.core import torch_flash
from nanoengine.core.attention import AttentionSpec
from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.flash_attention import CausalFlashAttention
from nanoengine.core.llm import CoreLLM
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.startup import Startup
from tests.core.paged_attention import in_contract
from tests.kernels.attention.contract import check_step
from tests.kernels.attention.every_backend import Kind
from tests.kernels.attention.paged import Heads, Pool, Sequences
from tests.kernels.attention.stand_ins import CAPABILITY, MODULES, PACKAGES, functions_of, installed, pretend_gpu

DEMO = str(Path(__file__).parents[2] / "nanoengine" / "demo")
CPU = torch.device("cpu")
BACKEND = in_contract(CausalFlashAttention)
every_package = pytest.mark.parametrize("package", PACKAGES)


@every_package
def test_any_step_is_attention_by_its_definition(package: str) -> None:
    kind = Kind(package, (256,), (8, 16, 32), 560, 120_000, frozenset(), False)
    with installed(package, exact=True):
        for seed in range(40):
            check_step(kind, BACKEND, seed)


def test_where_keys_start_is_worked_out_once() -> None:
    with installed("flash_attn", exact=True):
        pool = Pool(Sequences(Heads(2, 2, 8), 256, [3, 5, 300]), BACKEND(256))
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
    return CausalFlashAttention.unsupported_reason(CPU, dtype, head_dim, block_size) or ""


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
    assert reason().endswith(f", and torch {torch.__version__} has no copy of its own as 99.1 has")
    monkeypatch.setattr(torch_flash, "LEAST", TorchVersion("0"))
    assert not reason()
    assert CausalFlashAttention(256).functions is torch_flash


@every_package
def test_stand_ins_have_the_signatures_of_the_real_functions(package: str) -> None:
    if package == "torch_flash" and (why_not := torch_flash.unsupported_reason()):
        pytest.skip(why_not)
    real = pytest.importorskip(MODULES[package], reason="flash-attn is not installed", exc_type=ImportError)
    for name, function in functions_of(package).items():
        theirs = inspect.signature(getattr(real, name)).parameters.values()
        ours = inspect.signature(function).parameters.values()
        assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


# ---- which is chosen at start-up, and in blocks of which size


def started(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Startup:
    """Start-up on what seems to be a GPU, as far as its line: weights are those of the bundled model, on the CPU."""
    startup = Startup(EngineConfig(model=DEMO, dtype="bfloat16", device="cpu", **options))
    startup.describe()
    startup.load()
    monkeypatch.setattr(startup.device, "is_cuda", True)
    monkeypatch.setattr(startup.device, "torch_device", torch.device("cuda", 0))
    startup.backend, startup.max_model_len = startup._choose_backend(), 99
    return startup


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ({}, ("flash_attn", 256)),
        ({"block_size": 512}, ("flash_attn", 512)),
        ({"block_size": 16}, ("torch", 16)),
        ({"attention_backend": "torch"}, ("torch", 16)),
        ({"attention_backend": "flash_attn"}, ("flash_attn", 256)),
    ],
    ids=str,
)
@every_package
def test_blocks_are_as_the_backend_reads_them_unless_the_user_says_otherwise(
    package: str, asked: dict[str, Any], chosen: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with installed(package):
        startup = started(monkeypatch, **asked)
    assert (startup.backend.name, startup.backend.block_size) == chosen
    why = "it reads pages of a multiple of 256 tokens, and block_size is 16: leave it out"
    passed_over = f" (not flash_attn: {why})" if asked == {"block_size": 16} else ""
    line = f"on cuda:0, torch kernels, attention by {chosen[0]}{passed_over}, context 99 tokens"
    assert startup.description().endswith(line)


def test_a_backend_that_cannot_run_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "triton"):
        with installed("flash_attn"), pytest.raises(InvalidConfig, match=f"{name}.*block_size is 16: leave it out"):
            started(monkeypatch, attention_backend=name, block_size=16)


@every_package
def test_an_engine_over_it_says_what_plain_torch_says(package: str) -> None:
    prompts = [[5, 6, 7] * 20, [9] * 300, [5, 6, 7] * 20 + [4]]
    params, options = CoreSamplingParams(temperature=0.0, max_tokens=5), {"dtype": "float32", "max_model_len": 320}

    def answers() -> tuple[int, list[list[int]]]:
        with CoreLLM(DEMO, num_kv_blocks=100, **options) as llm:
            outputs = llm.generate(prompts, [params] * 3)
            return llm.engine.scheduler.blocks.block_size, [output.outputs[0].token_ids for output in outputs]

    size, expected = answers()
    with installed(package, exact=True):
        assert (size, answers()) == (16, (256, expected))
