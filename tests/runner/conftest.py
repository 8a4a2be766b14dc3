"""Runners of a tiny model, with any options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.config import EngineConfig, ModelConfig
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.models.loader import read_json
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.runner.stream import Stream
from tests.runner.fake_stream import FakeStream
from tests.support import tiny_checkpoint

MakeRunner = Callable[..., ModelRunner]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make(folder: Path) -> Iterator[MakeRunner]:
    """Makes a runner with some options; `model` are changes to the model's config."""
    runners = []

    def make_runner(
        *, model: dict[str, Any] | None = None, stream: Stream | None = None, **options: Any
    ) -> ModelRunner:
        config = EngineConfig(model=str(folder), **{"num_kv_blocks": 64, "device": "cpu"} | options)
        runners.append(ModelRunner(config, shape(folder, **model or {}), folder, use_tqdm=False, stream=stream))
        return runners[-1]

    yield make_runner
    for runner in runners:
        if runner.kv_cache is not None:
            runner.close()


def shape(folder: Path, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(read_json(folder, "config.json") | changes)


@pytest.fixture
def recordable(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of a runner whose decode steps are recorded: on the CPU all kernels can be repeated."""
    monkeypatch.setattr(TorchKernels, "capturable", True)
    monkeypatch.setattr(TorchAttention, "capturable", True)
    return {"stream": FakeStream(can_record=True), "kernels": "torch", "max_num_seqs": 6}
