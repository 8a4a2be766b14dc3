"""The rules of the house that a machine can see: clean linters, and tensors stay below the policy."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import IS_LINUX, run_forked

ROOT = Path(__file__).parent.parent


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)], ids=" ".join
)
def test_linters_are_clean(command: tuple[str, ...]) -> None:
    if importlib.util.find_spec(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed; `pip install -e .[dev]` brings it")
    result = run("-m", *command)
    assert result.returncode == 0, result.stdout + result.stderr


POLICY = {
    "core": ("llm", "llm_engine", "scheduler", "block_manager", "sequence", "messages", "seams", "config", "options"),
    "features.sampling": ("params", "collector", "stop_detokenizer"),
    "features.speculation": ("options", "speculation", "ngram"),
    "features.kv_groups": ("layouts", "common_prefix", "options", "messages", "snapshots"),
    "features.kv_offload": ("options", "offload", "host_tier", "disk_index", "file_gate", "kv_folder"),
    "features.structured": ("params", "grammars", "constraint", "forced_drafts", "mask_filling"),
    "features.lora": ("options", "request", "adapter", "adapters", "messages"),
    "features.pooling": ("params", "options", "files", "pooler", "outputs"),
    "features.fairness": ("options", "time_share", "least_priority"),
    "features.observability": ("metrics", "observer", "kv_events", "view"),
    "features.beam_search": ("search",),
    "features.tool_calls": ("chats", "grammar", "answer_parser", "prompt"),
    "serve.aio": ("async_llm_engine",),
    "serve.front": ("run", "ps", "model_server"),
    "scale.worker": ("child", "link", "remote_runner", "process"),
    "scale.replicas": (
        "messages",
        "replica",
        "router",
        "fleet",
        "carrier",
        "counts",
        "supervisor",
        "engine",
        "process",
    ),
}
"""Modules that decide, and leave tensors to others."""


def test_importing_the_package_or_its_policy_imports_neither_torch_nor_transformers() -> None:
    names = ["builder", "llm", *(f"{folder}.{module}" for folder, modules in POLICY.items() for module in modules)]
    imports = "; ".join(f"import nanoengine.{name}" for name in names)
    result = run("-c", f"import sys, nanoengine; {imports}; print({{'torch', 'transformers'}} & set(sys.modules))")
    assert result.stdout.strip() == "set()", result.stdout + result.stderr


WITHOUT_EXTRAS = """
import sys
extras = ("transformers", "triton", "flash_attn", "llguidance", "accelerate", "gguf", "openai")
for name in extras:
    sys.modules[name] = None  # an import of it fails, and find_spec finds nothing
from nanoengine.serve.cli import main
from nanoengine import LLM, SamplingParams
from nanoengine.errors import MissingPackage, InvalidSamplingParams

assert main(["demo", "--device", "cpu", "--max-tokens", "3"]) == 0
with LLM("demo", device="cpu", use_tqdm=False) as llm:
    llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=3), use_tqdm=False)
    for error, way, call in (
        (MissingPackage, "'nanoengine[transformers]'", llm.get_tokenizer),
        (InvalidSamplingParams, "llguidance", lambda: SamplingParams(structured_outputs={"regex": "a"})),
    ):
        try:
            call()
        except error as found:
            assert f"pip install {way}" in str(found), found
        else:
            raise AssertionError(way)
print("all of it")
"""


def test_what_everybody_gets_needs_no_extra() -> None:
    result = run("-c", WITHOUT_EXTRAS)
    assert result.stdout.endswith("all of it\n"), result.stdout + result.stderr


@pytest.mark.skipif(not IS_LINUX, reason="Python is forked on Linux alone")
def test_running_on_a_cpu_imports_no_package_that_only_others_need() -> None:
    """Where it is installed, too: each takes a second."""
    code = "import sys; from nanoengine.serve.cli import main; main(['demo', '--device', 'cpu', '--max-tokens', '3'])"
    result = run_forked(["-c", f"{code}; print({{'transformers', 'triton', 'starlette'}} & set(sys.modules))"])
    assert result.stdout.endswith("\nset()\n"), result.stdout + result.stderr


def test_the_core_stays_small() -> None:
    """All lines count. Who adds to it moves something out."""
    num_lines = sum(len(path.read_text().splitlines()) for path in (ROOT / "nanoengine" / "core").rglob("*.py"))
    assert num_lines <= 3990


FACTORIES = (
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "frombuffer", "full", "linspace", "logspace"),
    *("ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "zeros"),
)
"""Functions of torch that take from its state what they are not told."""


def test_every_new_tensor_says_its_dtype_and_its_device() -> None:
    """A default that a process has set for its own tensors must not reach those of an engine, which C reads."""
    found = []
    for path in (ROOT / "nanoengine").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name, said = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
                wanted = {"dtype"} if name == "torch.frombuffer" else {"dtype", "device"}
                if name.removeprefix("torch.") in FACTORIES and name.startswith("torch.") and wanted - said:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name} without {', '.join(wanted - said)}")
                if name.startswith("torch.set_default") or name in ("torch.Tensor", "torch.FloatTensor"):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert not found
