"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

# Tiny matrices gain nothing from more threads, and on a busy machine the threads wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # where a test asks for two, whoever waits must not spin
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may wait for a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# Before anything imports triton: its functions are decorated for one or the other.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanoengine import LLM
from nanoengine.kernels.native.support import unsupported_reason
from nanoengine.scale.replicas import carrier
from nanoengine.scale.worker import remote_runner
from tests.forks import IS_LINUX, start_child
from tests.quick_interpreter import quicken
from tests.support import tiny_checkpoint

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    quicken()

# The suite draws the same cases each time, so that a change is to blame for what it shows; look for new ones with
# `--hypothesis-profile=explore`.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-targets",
        action="store_true",
        help="compile the kernels for CPUs that this one stands for, too: before a release",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """The kernels are compiled before there are several processes of tests, each of which would compile them."""
    config = session.config
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        unsupported_reason(torch.device("cpu"), torch.float32)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no collection of garbage, of ours or Python's own, needs to look through them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _forked_children() -> Iterator[None]:
    """Workers and replicas are forks of a process that has imported torch, where Linux is."""
    with pytest.MonkeyPatch.context() as patch:
        if IS_LINUX:
            for module in (remote_runner, carrier):
                patch.setattr(module, "start_child", start_child)
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint."""
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error says that it is one, and is still captured by `capsys`."""
    request.getfixturevalue("capsys")
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True)  # the object is another one when the test runs


@pytest.fixture
def tiny_llm(tiny: Path) -> Iterator[LLM]:
    """A fresh engine on it."""
    with LLM(str(tiny), dtype="float32", device="cpu", num_kv_blocks=200, use_tqdm=False) as llm:
        yield llm


@pytest.fixture(scope="session")
def demo_llm() -> Iterator[LLM]:
    """The bundled model in float32, shared by the tests that leave it as they found it."""
    with LLM("demo", dtype="float32", device="cpu", num_kv_blocks=1200, use_tqdm=False) as llm:
        yield llm
