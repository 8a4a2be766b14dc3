"""Every capability can be deleted, and all of them together: what is left gives the same tokens, and what is gone is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanoengine.builder import CAPABILITIES, LAYERS

ROOT = Path(__file__).parents[1]
CLIENTS = ("aio", "beam_search", "server")
ALL = tuple(dict.fromkeys((*CAPABILITIES, *CLIENTS, *LAYERS)))
CASES = [*((name,) for name in CAPABILITIES), CLIENTS, ("gguf",), ALL]  # without one of LAYERS, none of them is used

PROGRAM = """
import json, sys
sys.meta_path[:] = [own for own in sys.meta_path if "Editable" not in repr(own)]  # it would find the original's folders
from nanoengine import LLM
from nanoengine.builder import CAPABILITIES, is_installed
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.sampling_params import SamplingParams

gone, said = json.loads(sys.argv[1]), {}
for folder in set(gone) & set(CAPABILITIES):
    for name in CAPABILITIES[folder].names:
        try:
            LLM(sys.argv[2], use_tqdm=False, **{name: None})
        except InvalidConfig as error:
            said[folder] = str(error)
options = {"dtype": "float32", "device": "cpu", "max_model_len": 200, "num_kv_blocks": 30}
if is_installed("speculation"):
    options["speculation"] = "ngram"
if is_installed("kv_offload"):
    options["kv_host_memory"] = 1 << 24
with LLM(sys.argv[2], use_tqdm=False, **options) as llm:
    prompts = [[7 * i % 300 + 300 for i in range(n)] for n in (5, 90, 40, 90)]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    greedy = [own.outputs[0].token_ids for own in llm.generate(prompts, params, use_tqdm=False)]
    drawn = llm.generate(prompts[:2], SamplingParams(seed=3, n=2, max_tokens=12, ignore_eos=True), use_tqdm=False)
    sampled = [[own.token_ids for own in output.outputs] for output in drawn]
print(json.dumps({"greedy": greedy, "sampled": sampled, "said": said}))
"""


def run_without(folder: Path, gone: tuple[str, ...]) -> dict[str, object]:
    """What the program says, run on a copy of the package in which some folders are not there."""
    copy = folder / "copy"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "nanoengine", copy / "nanoengine", ignore=ignored)
    for name in gone:
        shutil.rmtree(copy / "nanoengine" / name)
    model = copy / "nanoengine" / "demo"
    environment = os.environ | {"PYTHONPATH": str(copy), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(gone), str(model)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """With nothing deleted."""
    return run_without(tmp_path_factory.mktemp("whole"), ())


@pytest.mark.parametrize("gone", CASES, ids=lambda gone: "+".join(gone[:3]))
def test_what_is_left_says_the_same(tmp_path: Path, expected: dict[str, object], gone: tuple[str, ...]) -> None:
    found = run_without(tmp_path, gone)
    missing = {name for name, own in CAPABILITIES.items() if own.names and name in gone}
    said = found["said"]
    assert isinstance(said, dict)
    assert said.keys() == missing
    assert all(f"{name.replace('_', ' ')} is not installed" in text for name, text in said.items())
    if not set(gone) & set(LAYERS):  # the core's kernels round otherwise than those that were compiled for this CPU
        assert (found["greedy"], found["sampled"]) == (expected["greedy"], expected["sampled"])
    else:
        assert found["greedy"] == expected["greedy"]


def test_the_names_in_the_list_are_those_of_the_options() -> None:
    from dataclasses import fields
    from importlib import import_module

    for folder, own in CAPABILITIES.items():
        if own.options is not None:
            kind = getattr(import_module(f"nanoengine.{folder}.options"), own.options)
            assert own.names == tuple(field.name for field in fields(kind)), folder
