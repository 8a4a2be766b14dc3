"""LoRARequest: the adapter of a request, by vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.errors import InvalidRequest, shown


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter in a folder as PEFT saves it.

    Args:
        lora_name: its name.
        lora_int_id: a positive number, as vLLM's callers pass it. It is not used: adapters are identified by their files.
        lora_path: its folder. It is read for each call with it, so that a changed file is never overlooked. Empty: the adapter
            that was loaded under this name.

    Raises:
        InvalidRequest: a value of another type or range.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.isprintable():
                raise InvalidRequest(name, f" is {shown(value)}: it must be a string of printable characters")
        if not self.lora_name:
            raise InvalidRequest("lora_name", " is empty: give the adapter a name")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise InvalidRequest("lora_int_id", f" is {shown(self.lora_int_id)}: it must be a positive integer")
