"""The composition root: from options to an engine that is ready to step. Every interface, such as `LLM`, calls it.

`CAPABILITIES` has a line for each folder that can be deleted. Options of a deleted folder are a named error.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.interrupts import InterruptGuard, prepare_forks
from nanoengine.plugins import PluginOptions, plugin_errors
from nanoengine.sizes import parse_bytes

if TYPE_CHECKING:
    from nanoengine.core.capability import Capability
    from nanoengine.core.startup import Startup
    from nanoengine.features.observability.observer import Observer
    from nanoengine.models.capability import Models
    from nanoengine.models.tokenizer import ModelTokenizer

logger = logging.getLogger("nanoengine")


class CapabilityEntry(NamedTuple):
    """Names of the capability's class in capability.py and of its class of options in options.py; other folders and the installed
    package that it needs.
    """

    capability: str
    options: str | None = None
    needs: tuple[str, ...] = ()
    package: str | None = None


ROOMS = ("nanoengine", *(f"nanoengine.{room}" for room in ("kernels", "models", "features", "scale", "serve")))
"""Packages with the folders of capabilities and of interfaces."""

LAYERS = ("models", "kernels", "layers", "quantization", "gguf")
"""Folders that need each other."""


CAPABILITIES = {
    "ray": CapabilityEntry("Ray", "RayOptions", ("replicas", "worker", "observability")),
    "replicas": CapabilityEntry("Replicas", "ReplicaOptions", ("worker", "observability")),
    "parallel": CapabilityEntry("Parallel", "ParallelOptions", ("worker", *LAYERS)),
    "models": CapabilityEntry("Models", "ModelOptions", LAYERS),
    "kernels": CapabilityEntry("NativeAndTriton", "KernelOptions", LAYERS),
    "kv_groups": CapabilityEntry("KVGroups", "KVGroupsOptions"),
    "speculation": CapabilityEntry("SpeculativeDecoding", "SpeculationOptions"),
    "kv_offload": CapabilityEntry("KVOffload", "KVOffloadOptions"),
    "sampling": CapabilityEntry("Sampling"),
    "recording": CapabilityEntry("Recording", "RecordingOptions", LAYERS),
    "lora": CapabilityEntry("LoRA", "LoRAOptions", LAYERS),
    "structured": CapabilityEntry(
        "StructuredOutput", needs=("sampling", "speculation", "tool_calls"), package="llguidance"
    ),
    "pooling": CapabilityEntry("Pooling", "PoolingOptions"),
    "fairness": CapabilityEntry("Fairness", "FairnessOptions"),
    "observability": CapabilityEntry("Observability"),
}
"""Folder -> its capability, in the order of start-up."""

PROCESSES = ("ray", "replicas", "parallel")
"""Capabilities that choose the processes of the others; plugins come behind them, and before all others."""


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, and its capabilities, by their folders, or as MODULE.CAPABILITY."""

    config: EngineConfig
    engine: LLMEngine
    tokenizer: ModelTokenizer
    capabilities: Mapping[str, Any]

    @property
    def metrics(self) -> Observer:
        """The observer of the engine; raises InvalidConfig where observability is not installed."""
        observer: Observer = self._part("observability").metrics
        return observer

    @property
    def models(self) -> Models:
        """The contents of the model's files; raises InvalidConfig where families of models are not installed."""
        models: Models = self._part("models")
        return models

    def _part(self, folder: str) -> Any:
        if folder not in self.capabilities:
            raise not_installed(folder)
        return self.capabilities[folder]


def option_types(plugins: PluginOptions | None = None) -> list[type]:
    """The classes of all options: of the core, of installed capabilities, and of plugins. Their docstrings are the help of each
    option.
    """
    named = [(folder, each.options) for folder, each in CAPABILITIES.items() if each.options and is_installed(folder)]
    known = (getattr(import_module(f"{find_folder(folder)}.options"), name) for folder, name in named)
    types = [EngineConfig, PluginOptions, *known]
    return types if plugins is None else types + plugins.option_types(types)


def read_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """The options of an engine, checked; sizes may be text, such as "2GiB". torch is not imported for it.

    Raises:
        UnknownOption: an option of no class, such as one of a capability that is not installed.
        InvalidConfig: a value that cannot work.
    """
    types = option_types(PluginOptions(plugins=options.get("plugins")))
    sizes = {each.name for kind in types for each in fields(kind) if each.metadata.get("unit") == "bytes"}
    values = {k: parse_bytes(k, v) if k in sizes and isinstance(v, str) else v for k, v in options.items()}
    with plugin_errors("an option of a plugin cannot be that") if options.get("plugins") else nullcontext():
        return EngineConfig.from_options(model, values, tuple(types[1:]))


def build_engine(config: EngineConfig, use_tqdm: bool = True) -> Built:
    """Find a model, check all its files, and only then load it.

    Args:
        config: from `read_config`.
        use_tqdm: show the progress of start-up.

    Raises:
        InvalidConfig, KVCacheTooSmall: the options cannot work on this machine.
        ModelNotFound, UnsupportedModel, InvalidWeights: the model is missing, unsupported or broken. No size in its files
            costs time or memory before the comparison with the headers of its weights.
    """
    # The rest imports torch, which takes seconds: errors in options, and in the model's name, come before.
    if is_installed("models"):
        import_module("nanoengine.models.names").find_model(config.model)
    with InterruptGuard(), _no_collections():  # torch does not survive Ctrl-C while it is imported
        from nanoengine.core.startup import Startup

        classes = {
            folder: getattr(import_module(f"{find_folder(folder)}.capability"), each.capability)
            for folder, each in CAPABILITIES.items()
            if is_installed(folder)
        }
        _freeze_modules()
    first = {folder: kind for folder, kind in classes.items() if folder in PROCESSES}
    kinds = first | dict(config.of(PluginOptions).capabilities) | classes
    parts: dict[str, Capability] = {name: kind() for name, kind in kinds.items()}
    prepare_forks()
    startup = Startup(config, list(parts.values()), use_tqdm=use_tqdm)
    engine = startup.build()
    logger.info("%s", description(startup))
    logger.debug("%s", details(startup))
    return Built(config, engine, cast("ModelTokenizer", startup.tokenizer), parts)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Turn the garbage collector off during imports, where two collections of torch's objects take 100 ms each."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def description(startup: Startup) -> str:
    """The start-up line: model, dtype, device, kernels, threads or attention backend, and longest sequence."""
    name, device = startup.config.model, startup.device.torch_device
    attention = f"attention by {startup.backend.name}{startup.unavailable_backends}"
    units = f"{startup.device.num_threads} threads" if device.type == "cpu" else attention
    model = f"{name[-60:]}: {str(startup.dtype).removeprefix('torch.')} on {device}, {startup.layers_library}"
    return f"{model}{startup.kernels.name} kernels, {units}, context {startup.max_model_len} tokens"


def details(startup: Startup) -> str:
    """The second line of the start-up: model, kernels, pool, capabilities."""
    kernels = f"kernels: {startup.kernels.name} ({startup.kernels.description})"
    kernels += f"; attention: {startup.backend.name}{startup.unavailable_backends}"
    pool = f"KV pool: {startup.num_blocks} blocks x {startup.block_size} tokens"
    words = (each.describe_itself(startup) for each in startup.capabilities)
    return "; ".join(filter(None, [startup.model_config.architecture, kernels, pool, *words]))


@cache
def _freeze_modules() -> None:
    """Exclude the objects of torch's modules from garbage collection, which would take 100 ms for them. Once in a process, since
    the objects of a closed engine must be collected.
    """
    if gc.get_freeze_count() < 10_000:  # else the process has frozen them
        gc.freeze()


def is_installed(folder: str) -> bool:
    """Whether the folder of a capability exists, with all that it needs."""
    entry = CAPABILITIES.get(folder, CapabilityEntry(""))
    has_package = entry.package is None or find_spec(entry.package) is not None
    return has_package and all(find_folder(name) is not None for name in (folder, *entry.needs))


@cache
def find_folder(name: str) -> str | None:
    """The package of a folder in one of ROOMS; None if it was deleted."""
    rooms = (room for room in ROOMS if find_spec(room) is not None)
    return next((f"{room}.{name}" for room in rooms if find_spec(f"{room}.{name}") is not None), None)


def require(*folders: str) -> None:
    """Raise InvalidConfig for the first of these capabilities that is not installed."""
    for folder in folders:
        if not is_installed(folder):
            raise not_installed(folder)


def not_installed(folder: str) -> InvalidConfig:
    """The error for a capability that is not installed."""
    return InvalidConfig(
        f"{folder.replace('_', ' ')} is not installed: the folder {folder} of nanoengine, or what it needs, is not there"
    )
