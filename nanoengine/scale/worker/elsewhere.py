"""Of an engine whose model is in other processes: capabilities without their runners, and the options of those processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from nanoengine.core.capability import Capability
from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.startup import Startup

NOT_THERE: dict[str, Any] = {"lora_modules": None}
"""Options of processes that only compute: adapters are read by the process that has the requests, and sent."""


class WithoutRunner:
    """Forwards to a capability, but its hook `runner` does nothing: the runner is in another process."""

    def __init__(self, own: Capability):
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def runner(self, startup: Startup) -> None: ...


def take_model_away(startup: Startup, own: Capability) -> list[Capability]:
    """Let `own` be the first capability, and no other add anything to the runner; returns the others."""
    others = [each for each in startup.capabilities if each is not own]
    startup.capabilities = [own, *(cast(Capability, WithoutRunner(each)) for each in others)]
    return others


def check_shared(startup: Startup, ranks: int) -> None:
    """Raise InvalidConfig if so many ranks would have to share layers that no family of this package computes."""
    if ranks > 1 and startup.layers_by:
        raise InvalidConfig(
            f"tensor_parallel_size is {ranks}, but ranks do not share layers that transformers computes: use 1, or a model "
            "with a family here and model_impl='auto'"
        )


def replaced(config: EngineConfig, values: Mapping[str, Any]) -> EngineConfig:
    """The config with other values of these options; options that no capability has are left out."""
    options = {
        kind: dataclasses.replace(own, **{name: value for name, value in values.items() if hasattr(own, name)})
        for kind, own in config.options.items()
    }
    return dataclasses.replace(config, options=options)
