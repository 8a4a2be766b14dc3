"""Plugins: capabilities and families of models from modules outside of this package. Only named modules are loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any, get_type_hints

from nanoengine.core.capability import Capability
from nanoengine.core.errors import InvalidConfig, NanoEngineError, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginOptions:
    """Options of plugins.

    Args:
        plugins: names of modules, such as my_package.mine, each with a capability or a family of models.

    Raises:
        InvalidConfig: a module cannot be imported, or has neither.
    """

    plugins: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        names = () if self.plugins is None else self.plugins
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise InvalidConfig(f"plugins is {shown(names)}: it must be a list of names of modules")
        object.__setattr__(self, "plugins", tuple(dict.fromkeys(names)) or None)
        self.option_types([])

    def __reduce__(self) -> tuple[Callable[..., PluginOptions], tuple[Any, ...]]:
        # A config has these options first: the classes of the others may be importable from these paths alone.
        return _in_another_process, (self.plugins, [os.path.abspath(path) for path in sys.path if self.plugins])

    @property
    def capabilities(self) -> Mapping[str, type[Capability]]:
        """The capabilities, by MODULE.CAPABILITY."""
        loaded = {f"{name}.CAPABILITY": _load(name)[0] for name in self.plugins or ()}
        return {name: capability for name, capability in loaded.items() if capability is not None}

    @property
    def families(self) -> list[Any]:
        """The families: modules like those in models/families."""
        return [family for name in self.plugins or () if (family := _load(name)[1]) is not None]

    def option_types(self, known: Sequence[type]) -> list[type]:
        """The classes of the plugins' options; raises InvalidConfig for one without a default, or with a name of `known`."""
        names = {field.name for kind in known for field in fields(kind)}
        kinds = [(name, each.options) for name, each in self.capabilities.items() if each.options is not None]
        for name, kind in kinds:
            if not is_dataclass(kind):
                raise InvalidConfig(f"{name}.options is {shown(kind)}: it must be a frozen dataclass")
            for field in fields(kind):
                if field.name in names or field.default is field.default_factory is MISSING:
                    why = "must have another name" if field.name in names else "must have a default"
                    raise InvalidConfig(f"{name}.options: the field {shown(field.name)} {why}")
                names.add(field.name)
            with plugin_errors(f"the types of {name}.options cannot be read"):
                get_type_hints(kind)
        return [kind for _, kind in kinds]


@contextmanager
def plugin_errors(what: str) -> Iterator[None]:
    """A context for code of a plugin: any exception, also SystemExit, becomes an InvalidConfig that begins with `what`. Named
    errors and Ctrl-C stay.
    """
    try:
        yield
    except (NanoEngineError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise InvalidConfig(f"{what}: {type(error).__name__}: {str(error)[:200]}") from error


def _in_another_process(names: tuple[str, ...] | None, paths: Sequence[str]) -> PluginOptions:
    """Unpickle the options: the import paths of the first process are added behind those of this one."""
    sys.path.extend(path for path in paths if path not in sys.path)
    return PluginOptions(plugins=names)


def _load(name: str) -> tuple[type[Capability] | None, Any]:
    """The capability of a module, and the module itself if it is a family; raises InvalidConfig if there is neither."""
    where = "it must be installed, or in a folder of PYTHONPATH"
    with plugin_errors(f"plugins names {shown(name)}, which cannot be imported ({where})"):
        module = import_module(name)
    capability = getattr(module, "CAPABILITY", None)
    is_family = hasattr(module, "ARCHITECTURES") and callable(getattr(module, "read_config", None))
    if not (is_family if capability is None else isinstance(capability, type) and issubclass(capability, Capability)):
        raise InvalidConfig(
            f"plugins names {shown(name)}, whose CAPABILITY is {shown(capability)}: it must be a subclass of "
            "nanoengine.core.capability.Capability, or the module have ARCHITECTURES and read_config of a family of models"
        )
    return capability, module if is_family else None
