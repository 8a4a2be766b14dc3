"""Options of adapters."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoengine.core.config import BYTES, check_bool, check_count

MAX_RANK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAOptions:
    """Options of adapters; all are keyword arguments of `LLM`.

    Args:
        enable_lora: whether requests may name an adapter.
        max_loras: most adapters that are loaded at a time; all of them may be in one batch.
        max_lora_rank: largest rank of an adapter.
        max_lora_bytes: most bytes that the weights of all loaded adapters have in their files, or as "2GiB".

    Raises:
        InvalidConfig: a value that cannot work.
    """

    enable_lora: bool = False
    max_loras: int = 16
    max_lora_rank: int = 64
    max_lora_bytes: int = field(default=1 << 30, metadata=BYTES)

    def __post_init__(self) -> None:
        check_bool("enable_lora", self.enable_lora)
        check_count("max_loras", self.max_loras, 1024)
        check_count("max_lora_rank", self.max_lora_rank, MAX_RANK)
        check_count("max_lora_bytes", self.max_lora_bytes, 1 << 40)
