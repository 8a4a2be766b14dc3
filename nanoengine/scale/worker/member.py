"""Member: the place of a process in its group, and options that differ from those of the process that has the requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoengine.core.config import EngineConfig
from nanoengine.errors import NanoEngineError

NOT_THERE: dict[str, Any] = {"lora_modules": None}
"""Options of processes that only compute: adapters are read by the process that has the requests, and sent."""

ALIVE = "alive"
"""The message of a worker while it starts."""


class RankLost(NanoEngineError, RuntimeError):
    """Another process of the group did not come within the time that a step may take."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the group; it stands in `EngineConfig.options` of every worker."""

    rank: int
    size: int
    memory: int
    """Descriptor of an empty file without a name, which the processes of the group share as memory."""
    step_seconds: float


def replaced(config: EngineConfig, values: Mapping[str, Any]) -> EngineConfig:
    """The config with other values of these options; options that no capability has are left out."""
    options = {
        kind: dataclasses.replace(own, **{name: value for name, value in values.items() if hasattr(own, name)})
        for kind, own in config.options.items()
    }
    return dataclasses.replace(config, options=options)
