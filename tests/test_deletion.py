"""Every capability can be deleted, and all of them together: what is left gives the same tokens, and what is gone is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from nanoengine.builder import CAPABILITIES, LAYERS, find_folder

ROOT = Path(__file__).parents[1]
CLIENTS = ("aio", "beam_search", "chat", "server", "tool_calls")
ALL = tuple(dict.fromkeys((*CAPABILITIES, *CLIENTS, *LAYERS)))
CASES = [*((name,) for name in CAPABILITIES), CLIENTS, ("gguf",), ALL]  # without one of LAYERS, none of them is used

PROGRAM = """
import json, os, sys
import tokenizers, torch  # once: each deletion is tried in a process that is forked from this one

sys.meta_path[:] = [own for own in sys.meta_path if "Editable" not in repr(own)]  # it would find the original's folders


def say(model, options):
    from nanoengine import LLM
    from nanoengine.builder import is_installed
    from nanoengine.core.errors import UnknownOption
    from nanoengine.core.sampling_params import CoreSamplingParams as SamplingParams

    said = {}
    for name in options:
        try:
            LLM(model, use_tqdm=False, **{name: None})
        except UnknownOption as error:
            said[name] = str(error)
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 200, "num_kv_blocks": 30}
    if is_installed("speculation"):
        options["speculation"] = "ngram"
    if is_installed("kv_offload"):
        options["kv_host_memory"] = 1 << 24
    with LLM(model, use_tqdm=False, **options) as llm:
        prompts = [[7 * i % 300 + 300 for i in range(n)] for n in (5, 90, 40, 90)]
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        greedy = [own.outputs[0].token_ids for own in llm.generate(prompts, params, use_tqdm=False)]
        drawn = llm.generate(prompts[:2], SamplingParams(seed=3, n=2, max_tokens=12, ignore_eos=True), use_tqdm=False)
        sampled = [[own.token_ids for own in output.outputs] for output in drawn]
    print(json.dumps({"greedy": greedy, "sampled": sampled, "said": said}), flush=True)


for line in sys.stdin:
    copy, options = json.loads(line)
    child = os.fork()
    if not child:
        sys.path.insert(0, copy)
        say(copy + "/nanoengine/demo", options)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("null", flush=True)
"""

Said = dict[str, Any]
Run = Callable[[tuple[str, ...]], Said]


def options_of(folders: tuple[str, ...]) -> list[str]:
    """The names of the options of some capabilities."""
    own = {name: CAPABILITIES[name].options for name in folders if name in CAPABILITIES}
    kinds = [getattr(import_module(f"{find_folder(folder)}.options"), kind) for folder, kind in own.items() if kind]
    return [field.name for kind in kinds for field in fields(kind)]


@pytest.fixture(scope="module")
def run_without(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """What the program says, run on a copy of the package in which some folders are not there."""
    folder = tmp_path_factory.mktemp("deleted")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PROGRAM]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environment, **pipes) as process:

        def run(gone: tuple[str, ...]) -> Said:
            copy = folder / ("-".join(gone)[:50] or "whole")
            shutil.copytree(ROOT / "nanoengine", copy / "nanoengine")
            for name in gone:
                shutil.rmtree(
                    copy / str(find_folder(name)).replace(".", "/"), ignore_errors=True
                )  # in another one, perhaps
            print(json.dumps([str(copy), options_of(gone)]), file=process.stdin, flush=True)
            found: Said | None = json.loads(process.stdout.readline())
            assert found is not None, "it fails; its stderr says why"
            return found

        yield run


@pytest.fixture(scope="module")
def expected(run_without: Run) -> Said:
    """With nothing deleted."""
    return run_without(())


@pytest.mark.parametrize("gone", CASES, ids=lambda gone: "+".join(gone[:3]))
def test_what_is_left_says_the_same(run_without: Run, expected: Said, gone: tuple[str, ...]) -> None:
    found = run_without(gone)
    said = found["said"]
    assert list(said) == options_of(gone)
    assert all(f"unknown option '{name}'" in text for name, text in said.items())
    if not set(gone) & set(LAYERS):  # the core's kernels round otherwise than those that were compiled for this CPU
        assert (found["greedy"], found["sampled"]) == (expected["greedy"], expected["sampled"])
    else:
        assert found["greedy"] == expected["greedy"]
