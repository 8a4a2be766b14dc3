"""The oldest transformers that is taken computes the same kinds of models; all other tests run with the installed one."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.architectures.checkpoints import make
from nanoengine.builder import read_config
from nanoengine.core.startup import Startup
from nanoengine.errors import UnsupportedModel
from nanoengine.models.capability import Models
from nanoengine.models.transformers_backend.interface import OLDEST, register

ROOT = Path(__file__).parents[3]
VERSION = ".".join(map(str, OLDEST))
PACKAGES = f"transformers=={VERSION}.0 huggingface_hub==1.5.0 tokenizers==0.22.0 httpx==0.28.1 httpcore==1.0.9".split()
"""It, and packages that it takes in no newer versions or that newer ones do without."""

OUT_OF_REACH = "No matching distribution found", "Max retries exceeded", "No module named pip"
"""What pip says where it is not there or finds no index."""

NAMES = [f"{kind}ForCausalLM" for kind in ("Olmoe", "Cohere2", "DeepseekV3", "Bart")]
"""Of experts, of windows, of MLA, and one that counts its positions itself. GPT-2 has Conv1D."""

JUDGE = """
import sys, transformers, benchmarks.architectures.__main__ as judge
print(transformers.__version__)
judge.main(["--model-impl", "transformers", "--only", *sys.argv[1:]])
"""


def test_the_oldest_version_computes_each_kind_of_model(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--retries=1", "--timeout=10"]
    installed = subprocess.run([*pip, "--target", tmp_path, *PACKAGES], capture_output=True, text=True, check=False)
    if any(words in installed.stderr for words in OUT_OF_REACH):
        pytest.skip(f"pip does not reach transformers {VERSION}: {installed.stderr.strip().splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", JUDGE, "GPT2LMHeadModel", *NAMES]
    judged = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert judged.stdout.startswith(f"{VERSION}.0\n"), judged.stderr
    assert judged.stdout.count(" equal by transformers (") == 1 + len(NAMES), judged.stdout + judged.stderr


def test_an_older_version_and_none_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["transformers"] == [f"transformers>={VERSION},<6"]
    monkeypatch.setattr("transformers.__version__", "5.6.2")
    with pytest.raises(UnsupportedModel, match=rf"{VERSION} or newer, and 5\.6\.2 is installed: pip install 'nano"):
        register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedModel, match=r"it takes transformers: pip install 'nanoengine\[transformers\]'"):
        register()


def test_kv_on_disk_is_that_of_one_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("SeedOssForCausalLM", tmp_path)
    keys = []
    for version in ("5.24.0", "5.24.0", "5.99.0"):
        monkeypatch.setattr("transformers.__version__", version)
        startup = Startup(read_config(str(tmp_path), {"model_impl": "transformers"}), [Models()])
        startup.describe()
        keys.append(startup.weights_key(64))
    assert keys[0] == keys[1] != keys[2]
