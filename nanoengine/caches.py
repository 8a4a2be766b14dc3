"""Cache folders of the user: compiled kernels, fetched models, tuned parameters."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """The folder of a kind of files: below $XDG_CACHE_HOME, or ~/.cache; without a home folder, as in some containers, below the
    system's folder for temporary files. Never below the working directory, which may belong to another user.
    """
    for root in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(root):
            return Path(root, "nanoengine", kind)
    return Path(tempfile.gettempdir(), f"nanoengine-{os.geteuid()}", kind)
