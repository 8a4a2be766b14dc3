"""Runners of a tiny model, with any options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.runner.startup import Startup, start_runner
from nanoengine.runner.stream import Stream
from tests.runner.fake_stream import FakeStream
from tests.runner.options import engine_config, shape
from tests.runner.texts import Texts
from tests.support import tiny_checkpoint

MakeRunner = Callable[..., ModelRunner]
MakeStartup = Callable[..., Startup]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def native_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads that native attention can compute."""
    return tiny_checkpoint(tmp_path_factory.mktemp("native"), head_dim=32)


@pytest.fixture(scope="session")
def texts(native_folder: Path) -> Texts:
    """What follows any prompt on that checkpoint."""
    return Texts(native_folder)


@pytest.fixture
def make(folder: Path) -> Iterator[MakeRunner]:
    """Makes a runner with some options; `model` are changes to the model's config, `at` is another checkpoint."""
    runners = []

    def make_runner(
        *,
        model: dict[str, Any] | None = None,
        stream: Stream | None = None,
        at: Path = folder,
        **options: Any,
    ) -> ModelRunner:
        config = engine_config(at, **options)
        runners.append(start_runner(config, shape(at, **model or {}), at, use_tqdm=False, stream=stream))
        return runners[-1]

    yield make_runner
    for runner in runners:
        runner.close()


@pytest.fixture
def begin(folder: Path) -> MakeStartup:
    """Makes what is on the way to a runner: the model is there, and nothing else."""

    def make_startup(*, model: dict[str, Any] | None = None, stream: Stream | None = None, **options: Any) -> Startup:
        return Startup(engine_config(folder, **options), shape(folder, **model or {}), folder, stream, use_tqdm=False)

    return make_startup


@pytest.fixture
def recordable(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of a runner whose decode steps are recorded: on the CPU all kernels can be replayed."""
    monkeypatch.setattr(TorchKernels, "capturable", True)
    monkeypatch.setattr(TorchAttention, "capturable", True)
    return {"stream": FakeStream(can_record=True), "kernels": "torch", "max_num_seqs": 6}
