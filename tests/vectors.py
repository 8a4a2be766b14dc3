"""Where `tests/vectors.sh` puts the files of llama.cpp that tokenizers and chat templates are compared with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("NANOENGINE_VECTORS") or Path.home() / ".cache/nanoengine/vectors")


def vectors(pattern: str) -> list[Path]:
    """The files that match; if there is none, the test is skipped."""
    found = sorted(FOLDER.glob(pattern))
    if not found:
        pytest.skip(f"no {pattern} in {FOLDER}: run tests/vectors.sh, or set NANOENGINE_VECTORS")
    return found
