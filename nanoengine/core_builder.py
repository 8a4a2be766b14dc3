"""The list of capabilities: one line for each. Whose folder was deleted is not there, and what it would do is a named error."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from nanoengine.core.capability import Capability
from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidConfig

CAPABILITIES = {
    "models.capability:Models": ("tokenizer", "quantization"),
    "kernels.capability:NativeAndTriton": ("kernels", "activation_dtype", "kv_cache_dtype"),
    "kv_groups.capability:KVGroups": (),
    "speculation.capability:SpeculativeDecoding": ("speculation", "num_drafts"),
    "kv_offload.capability:KVOffload": ("preemption_mode", "kv_host_memory", "kv_disk_path", "kv_disk_bytes"),
    "sampling.capability:Sampling": (),
    "recording.capability:Recording": ("enforce_eager",),
    "fairness.capability:Fairness": ("max_client_share",),
    "observability.capability:Observability": (),
}
"""Module and class -> the names of its options."""


def capabilities() -> list[Capability]:
    """One of each that is installed, in the order of the list."""
    return [getattr(import_module(f"nanoengine.{module}"), name)() for module, name in _installed()]


def read_config(model: str, options: Mapping[str, Any], parts: list[Capability]) -> EngineConfig:
    """The options of an engine.

    Raises:
        InvalidConfig: an option of a capability that is not installed.
        UnknownOption: an option of none.
    """
    installed = {f"{module}:{name}" for module, name in _installed()}
    for where, names in CAPABILITIES.items():
        asked = next((name for name in names if name in options), None)
        if asked is not None and where not in installed:
            raise InvalidConfig(f"{asked} is an option of {where.partition('.')[0]}, which is not installed")
    kinds = tuple(part.options for part in parts if part.options is not None)
    return EngineConfig.from_options(model, options, kinds)


def _installed() -> list[tuple[str, str]]:
    pairs = [(module, name) for module, _, name in (where.partition(":") for where in CAPABILITIES)]
    return [(module, name) for module, name in pairs if _is_there(module)]


def _is_there(module: str) -> bool:
    parent = f"nanoengine.{module.partition('.')[0]}"
    return find_spec(parent) is not None and find_spec(f"nanoengine.{module}") is not None
