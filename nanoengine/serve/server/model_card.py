"""ModelCard: facts from the files of a model, under the names of Ollama's interface."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoengine.core.weights import weight_files
from nanoengine.models.description import config_table
from nanoengine.models.names import first_parts
from nanoengine.models.quantization.scheme import read_scheme

if TYPE_CHECKING:
    from nanoengine.models.capability import Models

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

KINDS = ("F32", "F16", "Q4_0", "Q4_1", *[""] * 3, "Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L")
FILE_TYPES = dict(enumerate((*KINDS, "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"))) | {32: "BF16", 38: "MXFP4"}
"""Names for `general.file_type` of GGUF files (https://github.com/ggml-org/llama.cpp, include/llama.h, enum llama_ftype)."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that is served.

    Attributes:
        size: bytes of the files of its weights.
        digest: sha256 of their names, sizes and times, in hexadecimal: it changes with each replaced file.
        modified: the time of the newest file, in ISO 8601.
        details, info: the tables of these names in Ollama's answers; `info` without the length of the context.
        writes: it has a head, so it can generate text.
    """

    size: int
    digest: str
    modified: str
    details: dict[str, Any]
    info: dict[str, Any]
    writes: bool

    @classmethod
    def of(cls, models: Models) -> ModelCard:
        """The card of a loaded model; no weights are read."""
        place, config, metadata = Path(models.checkpoint.location), models.model_config, models.metadata
        if place.is_dir():
            files, scheme = weight_files(place), read_scheme(config_table(place))
            dtype = DTYPES.get(config.dtype, config.dtype)
            level = dtype if scheme is None else f"{scheme.layout.upper()}-{scheme.bits}"
        else:
            files = [own for own in place.parent.glob("*.gguf") if first_parts([own]) == [place]] or [place]
            level = FILE_TYPES.get(metadata.get("general.file_type", -1), "unknown")
        stats = [(file.name, file.stat()) for file in sorted(files)]
        said = "\n".join(f"{name} {own.st_size} {own.st_mtime_ns}" for name, own in stats)
        family = metadata.get("general.architecture") or re.split("For|Model", config.architecture)[0].lower()
        count = models.num_parameters
        details = {
            "parent_model": "",
            "format": "safetensors" if place.is_dir() else "gguf",
            "family": family,
            "families": [family],
            "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M",
            "quantization_level": models.quantization.upper() if models.quantization else level,
        }
        info = {
            "general.architecture": family,
            "general.parameter_count": count,
            f"{family}.block_count": config.num_layers,
            f"{family}.embedding_length": config.hidden_size,
        }
        return cls(
            sum(own.st_size for _, own in stats),
            hashlib.sha256(said.encode()).hexdigest(),
            datetime.fromtimestamp(max(own.st_mtime for _, own in stats), UTC).isoformat(),
            details,
            info,
            not getattr(models.checkpoint, "is_headless", False),
        )
