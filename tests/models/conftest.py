"""Checkpoints in one file and in several, and copies of them to spoil."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import tiny_checkpoint

INDEX = "model.safetensors.index.json"
SHAPE = {"hidden_size": 24, "num_hidden_layers": 2, "attention_bias": True}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("original"), **SHAPE)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("sharded"), **SHAPE, max_shard_size="30KB")


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


@pytest.fixture
def sharded_copy(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "sharded"))
