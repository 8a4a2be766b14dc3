"""Options of adapters."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoengine.core.config import BYTES, check_bool, check_count
from nanoengine.core.errors import InvalidConfig, shown

MAX_RANK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAOptions:
    """Options of adapters; all are keyword arguments of `LLM`.

    Args:
        enable_lora: whether requests may name an adapter.
        max_loras: most adapters that are loaded at a time; all of them may be in one batch.
        max_lora_rank: largest rank of an adapter.
        max_lora_bytes: most bytes that the weights of all loaded adapters have in their files, or as "2GiB".
        lora_modules: adapters that are loaded from the start, each as "name=folder".

    Raises:
        InvalidConfig: a value that cannot work.
    """

    enable_lora: bool = False
    max_loras: int = 16
    max_lora_rank: int = 64
    max_lora_bytes: int = field(default=1 << 30, metadata=BYTES)
    lora_modules: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_bool("enable_lora", self.enable_lora)
        check_count("max_loras", self.max_loras, 1024)
        check_count("max_lora_rank", self.max_lora_rank, MAX_RANK)
        check_count("max_lora_bytes", self.max_lora_bytes, 1 << 40)
        modules = () if self.lora_modules is None else self.lora_modules
        if not isinstance(modules, list | tuple) or not all(isinstance(own, str) and "=" in own for own in modules):
            raise InvalidConfig(f'lora_modules is {shown(modules)}: it must be a list of strings like "name=folder"')
        if modules and not self.enable_lora:
            raise InvalidConfig("lora_modules are given, but enable_lora is False: set it to True")
