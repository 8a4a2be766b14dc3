"""Options of the model and its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nanoengine.core.config import check_choice
from nanoengine.core.errors import InvalidConfig, shown

QUANTIZATIONS = ("int8", "int4", "int4-128", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of the model and its files.

    Args:
        tokenizer: a folder, a hub name or "demo", if the tokenizer is not the model's own.
        quantization: store weights in fewer bits than the checkpoint does: "int8" (a scale for each output), "int4" (groups of 32
            inputs with a scale and a zero point), "int4-128" (groups of 128), or "fp8" (on GPUs that multiply it, with
            activations to match). None: as in the files, which may be quantized themselves.
    """

    tokenizer: str | Path | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        if self.quantization is not None:
            check_choice("quantization", self.quantization, QUANTIZATIONS)
        if isinstance(self.tokenizer, Path):
            object.__setattr__(self, "tokenizer", str(self.tokenizer))
        if self.tokenizer is not None and not isinstance(self.tokenizer, str):
            raise InvalidConfig(f"tokenizer is {shown(self.tokenizer)}: it must be a folder or a name")
