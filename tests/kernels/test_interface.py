"""Which kernels are chosen, and what is said about it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.attention.backend import choose_backend
from nanoengine.errors import InvalidConfig
from nanoengine.kernels import c_functions, libraries, native_operations
from nanoengine.kernels.interface import Kernels, choose_kernels
from nanoengine.kernels.native_operations import unsupported_reason
from tests.kernels.marks import needs_kernels
from tests.support import QWEN3_06B, model_runner

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def choose(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Kernels:
    return choose_kernels(name, torch.device(device), dtype)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler, where nothing was compiled before."""
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.delenv("NANOENGINE_CPU", raising=False)  # a target by name cannot do without
    monkeypatch.setattr(c_functions, "load_library", libraries.load_library.__wrapped__)
    monkeypatch.setattr(native_operations, "c_functions", c_functions.c_functions.__wrapped__)


@needs_kernels
@pytest.mark.parametrize("name", ["native", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_by_name_or_where_they_can_run(name: str, dtype: torch.dtype) -> None:
    kernels = choose(name, dtype)
    assert kernels.name == "native"
    assert kernels.description
    assert kernels.capturable
    assert unsupported_reason(CPU, dtype) is None


@needs_kernels
@pytest.mark.parametrize("is_due", [False, True])
@pytest.mark.parametrize("use_tqdm", [False, True])
def test_compiling_is_shown_if_it_is_due_and_shall_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_due: bool, use_tqdm: bool
) -> None:
    monkeypatch.setattr(native_operations, "must_compile", lambda: is_due)
    choose_kernels("auto", CPU, torch.float32, use_tqdm=use_tqdm)
    assert ("Compiling kernels" in capsys.readouterr().err) == (is_due and use_tqdm)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_auto_is_torch_and_says_why() -> None:
    kernels = choose("auto")
    assert kernels.name == "torch"
    assert "no C++ compiler" in kernels.description
    assert "/nowhere/c++" in kernels.description
    assert unsupported_reason(CPU, torch.float32) is not None
    assert "no native" not in choose("torch").description
    with pytest.raises(InvalidConfig, match=r"native.*no C\+\+ compiler.*/nowhere/c\+\+"):
        choose("native")


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_attention_is_torchs_too() -> None:
    backend, passed_over = choose_backend("auto", CPU, torch.float32, QWEN3_06B, 16)
    assert backend.name == "torch"
    assert passed_over.startswith("native: no C++ compiler")
    with pytest.raises(InvalidConfig, match=r"native: no C\+\+ compiler"):
        choose_backend("native", CPU, torch.float32, QWEN3_06B, 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_where_native_ones_cannot_run_the_reason_is_said(dtype: torch.dtype) -> None:
    named = str(dtype).removeprefix("torch.")
    kernels = choose("auto", dtype)
    assert kernels.name == "torch"
    assert not kernels.capturable
    assert kernels.description.startswith("no native ones: ")
    assert named in kernels.description
    with pytest.raises(InvalidConfig, match=f"native.*{named}"):
        choose("native", dtype)


def test_native_ones_do_not_run_on_a_gpu() -> None:
    with pytest.raises(InvalidConfig, match=r"kernels is 'native'.*cuda"):
        choose("native", device="cuda")


@needs_triton
@pytest.mark.parametrize("name", ["triton", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_they_are_tritons(name: str, dtype: torch.dtype) -> None:
    kernels = choose(name, dtype, "cuda")
    assert kernels.name == "triton"
    assert kernels.capturable


def test_on_a_gpu_without_triton_they_are_torchs_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it fails now
    kernels = choose("auto", device="cuda")
    assert kernels.name == "torch"
    assert not kernels.capturable
    assert "no triton ones: the package triton is not installed" in kernels.description
    with pytest.raises(InvalidConfig, match=r"kernels is 'triton'.*the package triton is not installed"):
        choose("triton", device="cuda")


@needs_triton
def test_on_a_cpu_tritons_run_only_if_they_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(InvalidConfig, match=r"kernels is 'triton'.*Triton has no code for cpu"):
        choose("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert choose("triton").name == "triton"
    assert choose("auto").name != "triton"


# ---- whole engines

PROMPTS = ["def binary_search(items, target):", "import os", "class Stack:\n    def __init__(self):\n" * 8]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

PROGRAM = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
from nanoengine import LLM, SamplingParams
with LLM("demo", dtype="float32", device="cpu", use_tqdm=False) as llm:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(json.loads(sys.argv[1]), params, use_tqdm=False)
print(json.dumps([output.outputs[0].token_ids for output in outputs]))
"""


def start(tmp_path: Path, cxx: str) -> tuple[list[list[int]], str]:
    """An engine in a process of its own, with an empty cache of kernels: its tokens, and what it logs."""
    environment = os.environ | {"CXX": cxx, "XDG_CACHE_HOME": str(tmp_path / "cache"), "NANOENGINE_CPU": "native"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(PROMPTS)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), result.stderr


def start_up_line(log: str) -> str:
    return next(line for line in log.splitlines() if "attention:" in line)


@needs_kernels
def test_the_demo_generates_the_same_tokens_without_a_compiler(tmp_path: Path, demo_llm: LLM) -> None:
    assert model_runner(demo_llm).kernels.name == "native"
    expected = [output.outputs[0].token_ids for output in demo_llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    tokens, log = start(tmp_path, cxx="/nowhere/c++")
    assert tokens == expected
    line = start_up_line(log)
    assert "kernels: torch" in line
    assert "no C++ compiler (/nowhere/c++) was found" in line
    assert "attention: torch" in line


@needs_kernels
def backends(llm: LLM) -> set[str]:
    """Names of the attention backends of all layers."""
    return {layer.self_attn.attention.backend.name for layer in model_runner(llm).model.layers}


def test_torch_kernels_bring_torch_attention_unless_it_is_named() -> None:
    for attention, expected in (("auto", "torch"), ("native", "native"), ("torch", "torch")):
        options = {"attention_backend": attention, "num_kv_blocks": 20, "dtype": "float32", "device": "cpu"}
        with LLM("demo", kernels="torch", use_tqdm=False, **options) as llm:
            assert model_runner(llm).kernels.name == "torch"
            assert backends(llm) == {expected}
