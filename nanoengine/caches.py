"""Folders for what this user keeps between runs: compiled kernels, fetched models, what was tuned."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """Where files of a kind are kept: below $XDG_CACHE_HOME, or ~/.cache; where this user has no home, as in some containers,
    below the system's folder for temporary files. Never below the working directory: that may be anybody's.
    """
    for root in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(root):
            return Path(root, "nanoengine", kind)
    return Path(tempfile.gettempdir(), f"nanoengine-{os.geteuid()}", kind)
