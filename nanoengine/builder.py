"""The composition root: from options to an engine that is ready to step. Every door, such as `LLM`, calls it.

`CAPABILITIES` has a line for each folder that can be deleted. What is deleted is left out, and asking for it is a named error.
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
from nanoengine.plugins import PluginOptions, code_of_others
from nanoengine.sizes import size

if TYPE_CHECKING:
    from nanoengine.core.capability import Capability
    from nanoengine.core.startup import Startup
    from nanoengine.features.observability.observer import Observer
    from nanoengine.models.capability import Models
    from nanoengine.models.tokenizer import ModelTokenizer

logger = logging.getLogger("nanoengine")


class Entry(NamedTuple):
    """Names of the capability's class in capability.py and of its class of options in options.py; the other folders that must be
    there, and the installed package.
    """

    capability: str
    options: str | None = None
    needs: tuple[str, ...] = ()
    package: str | None = None


ROOMS = ("nanoengine", *(f"nanoengine.{room}" for room in ("kernels", "models", "features", "scale", "serve")))
"""Packages in which the folders of capabilities and of other doors are."""

LAYERS = ("models", "kernels", "layers", "quantization", "gguf")
"""Folders that only work together."""


CAPABILITIES = {
    "ray": Entry("Ray", "RayOptions", ("replicas", "worker", "observability")),
    "replicas": Entry("Replicas", "ReplicaOptions", ("worker", "observability")),
    "parallel": Entry("Parallel", "ParallelOptions", ("worker", *LAYERS)),
    "models": Entry("Models", "ModelOptions", LAYERS),
    "kernels": Entry("NativeAndTriton", "KernelOptions", LAYERS),
    "kv_groups": Entry("KVGroups", "KVGroupsOptions"),
    "speculation": Entry("SpeculativeDecoding", "SpeculationOptions"),
    "kv_offload": Entry("KVOffload", "KVOffloadOptions"),
    "sampling": Entry("Sampling"),
    "recording": Entry("Recording", "RecordingOptions", LAYERS),
    "lora": Entry("LoRA", "LoRAOptions", LAYERS),
    "structured": Entry("StructuredOutput", needs=("sampling", "speculation", "tool_calls"), package="llguidance"),
    "pooling": Entry("Pooling", "PoolingOptions"),
    "fairness": Entry("Fairness", "FairnessOptions"),
    "observability": Entry("Observability"),
}
"""Folder -> what is in it, in the order in which they take part in start-up."""

PROCESSES = ("ray", "replicas", "parallel")
"""Those that say in which process the others are; plugins come behind them, and before all others."""


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, and the capabilities that it was built of, by their folders, or as MODULE.CAPABILITY."""

    config: EngineConfig
    engine: LLMEngine
    tokenizer: ModelTokenizer
    capabilities: Mapping[str, Any]

    @property
    def metrics(self) -> Observer:
        """What observes the engine; raises InvalidConfig where observability is not installed."""
        found: Observer = self._part("observability").metrics
        return found

    @property
    def models(self) -> Models:
        """What the model's files say; raises InvalidConfig where families of models are not installed."""
        found: Models = self._part("models")
        return found

    def _part(self, folder: str) -> Any:
        if folder not in self.capabilities:
            raise not_installed(folder)
        return self.capabilities[folder]


def option_types(plugins: PluginOptions | None = None) -> list[type]:
    """The classes of all options: the core's, and those of what is installed, and of plugins. Their docstrings are the help of
    each option.
    """
    found = [(folder, own.options) for folder, own in CAPABILITIES.items() if own.options and is_installed(folder)]
    known = (getattr(import_module(f"{find_folder(folder)}.options"), name) for folder, name in found)
    types = [EngineConfig, PluginOptions, *known]
    return types if plugins is None else types + plugins.option_types(types)


def read_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """The options of an engine, checked; sizes may be text, such as "2GiB". torch is not imported for it.

    Raises:
        UnknownOption: an option that nobody has, such as one of a capability that is not installed.
        InvalidConfig: a value that cannot work.
    """
    types = option_types(PluginOptions(plugins=options.get("plugins")))
    sizes = {own.name for kind in types for own in fields(kind) if own.metadata.get("unit") == "bytes"}
    values = {k: size(k, v) if k in sizes and isinstance(v, str) else v for k, v in options.items()}
    with code_of_others("an option of a plugin cannot be that") if options.get("plugins") else nullcontext():
        return EngineConfig.from_options(model, values, tuple(types[1:]))


def build_engine(config: EngineConfig, use_tqdm: bool = True) -> Built:
    """Find a model, look at all that its files say, and only then load it.

    Args:
        config: from `read_config`.
        use_tqdm: show what is being done.

    Raises:
        InvalidConfig, KVCacheTooSmall: the options cannot work on this machine.
        ModelNotFound, UnsupportedModel, InvalidWeights: the model is missing, unsupported or broken. Nothing that its files
            say takes time or memory before it was compared with the headers of its weights.
    """
    # The rest imports torch, which takes seconds: mistakes in options, and in the model's name, are told at once.
    if is_installed("models"):
        import_module("nanoengine.models.names").find_model(config.model)
    with InterruptGuard(), _no_collections():  # torch does not survive Ctrl-C while it is imported
        from nanoengine.core.startup import Startup

        own = {
            folder: getattr(import_module(f"{find_folder(folder)}.capability"), own.capability)
            for folder, own in CAPABILITIES.items()
            if is_installed(folder)
        }
        _freeze_modules()
    first = {folder: kind for folder, kind in own.items() if folder in PROCESSES}
    kinds = first | dict(config.of(PluginOptions).capabilities) | own
    parts: dict[str, Capability] = {name: kind() for name, kind in kinds.items()}
    prepare_forks()
    startup = Startup(config, list(parts.values()), use_tqdm=use_tqdm)
    engine = startup.build()
    logger.info("%s", description(startup))
    logger.debug("%s", details(startup))
    return Built(config, engine, cast("ModelTokenizer", startup.tokenizer), parts)


@contextmanager
def _no_collections() -> Iterator[None]:
    """While modules are imported, the garbage collector twice takes 100 ms to look through all that torch has made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def description(startup: Startup) -> str:
    """The start-up line: what runs where, and how long a sequence may be."""
    name, where = startup.config.model, startup.device.torch_device
    attention = f"attention by {startup.backend.name}{startup.passed_over}"
    how = f"{startup.device.num_threads} threads" if where.type == "cpu" else attention
    what = f"{name[-60:]}: {str(startup.dtype).removeprefix('torch.')} on {where}, {startup.layers_by}"
    return f"{what}{startup.kernels.name} kernels, {how}, context {startup.max_model_len} tokens"


def details(startup: Startup) -> str:
    """The second line of the start-up: model, kernels, pool, capabilities."""
    kernels = f"kernels: {startup.kernels.name} ({startup.kernels.description})"
    kernels += f"; attention: {startup.backend.name}{startup.passed_over}"
    pool = f"KV pool: {startup.num_blocks} blocks x {startup.block_size} tokens"
    words = (own.describe_itself(startup) for own in startup.capabilities)
    return "; ".join(filter(None, [startup.model_config.architecture, kernels, pool, *words]))


@cache
def _freeze_modules() -> None:
    """What torch has made stays: the garbage collector takes 100 ms to look through it, in start-up and later. Once in a process,
    as what is left of an engine that was closed must be collected.
    """
    if gc.get_freeze_count() < 10_000:  # else the process has done so
        gc.freeze()


def is_installed(folder: str) -> bool:
    """Whether the folder of a capability is there, and what it needs."""
    own = CAPABILITIES.get(folder, Entry(""))
    is_there = own.package is None or find_spec(own.package) is not None
    return is_there and all(find_folder(name) is not None for name in (folder, *own.needs))


@cache
def find_folder(name: str) -> str | None:
    """The package of a folder, in whichever room it is; None if it was deleted."""
    rooms = (room for room in ROOMS if find_spec(room) is not None)
    return next((f"{room}.{name}" for room in rooms if find_spec(f"{room}.{name}") is not None), None)


def not_installed(folder: str) -> InvalidConfig:
    return InvalidConfig(
        f"{folder.replace('_', ' ')} is not installed: the folder {folder} of nanoengine, or what it needs, is not there"
    )
