"""Member: which process of a group this one is, and what options it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoengine.core.config import EngineConfig
from nanoengine.errors import NanoEngineError

NOT_THERE: dict[str, Any] = {"lora_modules": None}
"""Options of who only computes: what they name is read where requests are, and sent."""

ALIVE = "alive"
"""What a worker says while it starts."""


class RankLost(NanoEngineError, RuntimeError):
    """Another process of the group did not come within the time that a step may take."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the group; it stands in `EngineConfig.options` of every worker."""

    rank: int
    size: int
    memory: int
    """A descriptor of an empty file without a name: what the group's processes share. It is gone with the last of them."""
    step_seconds: float


def replaced(config: EngineConfig, values: Mapping[str, Any]) -> EngineConfig:
    """The same with other values of these options, as far as anybody has them."""
    options = {
        kind: dataclasses.replace(own, **{name: value for name, value in values.items() if hasattr(own, name)})
        for kind, own in config.options.items()
    }
    return dataclasses.replace(config, options=options)
