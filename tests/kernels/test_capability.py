"""Which dtype and kernels are chosen, and what is said about it."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from nanoengine import LLM
from nanoengine.errors import InvalidConfig
from nanoengine.kernels.capability import choose_backend, choose_dtype, choose_kernels
from nanoengine.kernels.native import c_functions, libraries
from nanoengine.kernels.native import support as native_operations
from nanoengine.kernels.native.support import unsupported_reason
from nanoengine.kernels.operations import Kernels
from tests.kernels.marks import needs_kernels
from tests.support import model_runner

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


def test_a_gpu_that_emulates_bfloat16_computes_in_float32_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    device = torch.device("cuda", 0)
    assert choose_dtype("auto", "bfloat16", device) == torch.float32
    assert choose_dtype("auto", "float16", device) == torch.float16
    assert choose_dtype("bfloat16", "float32", device) == torch.bfloat16


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
@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("is_due", [False, True])
@pytest.mark.parametrize("use_tqdm", [False, True])
def test_compiling_is_shown_if_it_is_due_and_shall_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_due: bool, use_tqdm: bool
) -> None:
    monkeypatch.setattr(native_operations, "must_compile", lambda: is_due)
    choose_kernels("auto", CPU, torch.float32, use_tqdm=use_tqdm)
    assert ("Compiling kernels" in capsys.readouterr().err) == (is_due and use_tqdm)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_kernels_and_attention_are_torchs_and_say_why() -> None:
    kernels, (backend, unavailable_backends) = choose("auto"), choose_backend("auto", CPU, torch.float32, 16, [128])
    assert (kernels.name, backend.name) == ("torch", "torch")
    assert "no C++ compiler (/nowhere/c++) is installed" in kernels.description
    assert unavailable_backends.startswith("native: no C++ compiler")
    assert "no native" not in choose("torch").description
    with pytest.raises(InvalidConfig, match=r"native.*no C\+\+ compiler.*/nowhere/c\+\+"):
        choose("native")
    with pytest.raises(InvalidConfig, match=r"native: no C\+\+ compiler"):
        choose_backend("native", CPU, torch.float32, 16, [128])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_where_native_ones_cannot_run_the_reason_is_said(dtype: torch.dtype) -> None:
    named, kernels = str(dtype).removeprefix("torch."), choose("auto", dtype)
    assert (kernels.name, kernels.capturable) == ("torch", False)
    assert kernels.description.startswith("no native ones: ")
    assert named in kernels.description
    for other, device, reason in ((dtype, "cpu", named), (torch.float32, "cuda", "cuda")):
        with pytest.raises(InvalidConfig, match=f"kernels is 'native'.*{reason}"):
            choose("native", other, device)


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


@pytest.mark.parametrize(
    ("attention", "expected"),
    [("auto", "torch"), pytest.param("native", "native", marks=needs_kernels), ("torch", "torch")],
)
def test_torch_kernels_bring_torch_attention_unless_it_is_named(attention: str, expected: str) -> None:
    options = {"attention_backend": attention, "num_kv_blocks": 20, "dtype": "float32", "device": "cpu"}
    with LLM("demo", kernels="torch", use_tqdm=False, **options) as llm:
        runner = model_runner(llm)
        assert runner.kernels.name == "torch"
        assert {layer.self_attn.attention.backend.name for layer in runner.model.layers} == {expected}
