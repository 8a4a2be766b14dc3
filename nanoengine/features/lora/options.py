"""Options of adapters."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.errors import InvalidConfig, shown
from nanoengine.core.options import check, option

MAX_RANK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAOptions:
    """Options of adapters; all are keyword arguments of `LLM`.

    Args:
        enable_lora: whether requests may name an adapter.
        max_loras: most loaded adapters; all of them may be in one batch.
        max_lora_rank: largest rank of an adapter.
        max_lora_bytes: most bytes of the weights of all loaded adapters in their files, or as "2GiB".
        lora_modules: adapters that are loaded from the start, each as "name=folder".

    Raises:
        InvalidConfig: a value that cannot work.
    """

    enable_lora: bool = False
    max_loras: int = option(16, high=1024)
    max_lora_rank: int = option(64, high=MAX_RANK)
    max_lora_bytes: int = option(1 << 30, high=1 << 40, unit="bytes")
    lora_modules: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check(self)
        modules = () if self.lora_modules is None else self.lora_modules
        if not isinstance(modules, list | tuple) or not all(isinstance(each, str) and "=" in each for each in modules):
            raise InvalidConfig(f'lora_modules is {shown(modules)}: it must be a list of strings like "name=folder"')
        if modules and not self.enable_lora:
            raise InvalidConfig("lora_modules are set, but enable_lora is False: set it to True")
