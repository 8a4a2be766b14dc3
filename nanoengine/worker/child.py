"""A process of this package that another one starts, with a socket between them; and errors as one tells them to the other."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def start_child(
    module: str, *descriptors: int, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run a module, which is told the number of its end of the socket. Nothing that lies in the working folder is imported: it
    may be the folder of a model.

    Args:
        descriptors: it has these, too.
        environment: variables that it has beside, or in place of, those of this process.
    """
    own, other = socket.socketpair()
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (root, *os.environ.get("PYTHONPATH", "").split(os.pathsep))))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(other.fileno())],
        pass_fds=[other.fileno(), *descriptors],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
    )
    other.close()
    return process, own


def portable(error: Exception) -> Exception:
    """The same, if it can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as problem:  # whatever the error holds
        return RuntimeError(f"{type(error).__name__}: {error} ({problem})")
    return error
