"""MemoryPlan: how much memory models need, and whether one more fits. `Loader` makes the room."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nanoengine.ram import available_ram
from nanoengine.serve.front.catalogue import Source
from nanoengine.serve.front.headers import Headers

PROCESS_BYTES = 384 << 20
"""Of a process with torch, beside its weights and its K/V: measured with the demo model, with room for steps."""

MAX_KV_BYTES = 4 << 30
"""The largest K/V pool of a model whose options say nothing of it, as that of one model alone."""


class MemoryPlan:
    """Of this machine.

    Args:
        max_loaded: models that divide it.
        available: bytes that processes can still take.
    """

    def __init__(self, max_loaded: int, available: Callable[[], int] = available_ram):
        self.available = available
        self._kv_bytes = max(1, min(available() // 2 // max_loaded, MAX_KV_BYTES))

    def plan(self, source: Source, headers: Headers | None) -> tuple[dict[str, Any], int]:
        """Options of a model's engine, with the size of its K/V pool, and the bytes that the model takes with them: weights, K/V
        and the process.
        """
        config, options = source.config, dict(source.options)
        most = self._kv_bytes if headers is None else headers.kv_bytes(config)
        kv_bytes = config.kv_cache_memory or most
        if config.kv_cache_memory is None and config.num_kv_blocks is None:
            options["kv_cache_memory"] = kv_bytes = min(most, self._kv_bytes)
        weights = 0 if headers is None else headers.weight_bytes(config)
        return options, weights + kv_bytes + PROCESS_BYTES

    def free(self, processes: Mapping[int, int]) -> int:
        """Bytes for one more model.

        Args:
            processes: of loaded models: the need of each by its process id. What they have not touched yet is not free.
        """
        return self.available() - sum(max(0, need - resident(pid)) for pid, need in processes.items())


def resident(pid: int) -> int:
    """Bytes of RAM of a process alone; pages of files are left out, which the system can drop. 0 where Linux is not."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"^RssAnon:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) << 10 if match else 0
