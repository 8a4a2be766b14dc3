"""Checkpoints that the tests on a GPU share, and what the CPU makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.engines import MODEL, Tokens, on_cpu, requests
from tests.support import tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("gpu"), **MODEL)


@pytest.fixture(scope="session")
def expected(checkpoint: Path) -> Tokens:
    """What the CPU answers to `requests()`."""
    return on_cpu(checkpoint, *requests())
