"""The core runs with the rest of the package deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "nanoengine"
CODE = """
import importlib, pkgutil
import nanoengine.core as core
for module in pkgutil.walk_packages(core.__path__, "nanoengine.core."):
    importlib.import_module(module.name)
from nanoengine.core.llm import CoreLLM
from nanoengine.core.sampling_params import CoreSamplingParams
with CoreLLM("nanoengine/demo", dtype="float32", max_model_len=64) as llm:
    text = llm.generate(["def "], CoreSamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))[0].outputs[0].text
print(core.__file__, repr(text))
"""


def test_the_core_runs_with_the_rest_of_the_package_deleted(tmp_path: Path) -> None:
    for part, left_out in (("core", "__pycache__"), ("demo", "*.py")):
        shutil.copytree(PACKAGE / part, tmp_path / "nanoengine" / part, ignore=shutil.ignore_patterns(left_out))
    (tmp_path / "nanoengine" / "__init__.py").touch()
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CODE]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(str(tmp_path)), "it is the copy that ran"
