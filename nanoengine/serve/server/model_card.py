"""ModelCard: facts from the files of a model, under the names of Ollama's interface."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoengine.models.description import config_table
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.names import gguf_parts
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

    def row(self, name: str, model: str) -> dict[str, Any]:
        """The row of a name in Ollama's lists: of the model, or of one of its adapters."""
        details = self.details if name == model else {**self.details, "parent_model": model}
        files = {"modified_at": self.modified, "size": self.size, "digest": self.digest, "details": details}
        return {"name": name, "model": name, **files}

    @classmethod
    def of(cls, models: Models) -> ModelCard:
        """The card of a loaded model; no weights are read."""
        from nanoengine.core.weights import weight_files  # it takes torch, which cards of files do without

        path, writes = Path(models.checkpoint.location), not getattr(models.checkpoint, "is_headless", False)
        files = weight_files(path) if path.is_dir() else gguf_parts(path)
        level = models.quantization and models.quantization.upper()
        return cls.of_files(path, files, models.model_config, models.metadata, models.num_parameters, level, writes)

    @classmethod
    def of_files(
        cls,
        path: Path,
        files: Iterable[Path],
        config: ModelConfig,
        metadata: Mapping[str, Any],
        count: int,
        level: str | None = None,
        writes: bool = True,
    ) -> ModelCard:
        """The card of the files of a model, which may not be loaded.

        Args:
            path: the folder, or the first GGUF file.
            files: those of the weights.
            config, metadata: content of the files; `metadata` is empty for a folder.
            count: number of parameters.
            level: the quantization at load. None: that of the files.
            writes: see the class.
        """
        if level is None and path.is_dir():
            scheme = read_scheme(config_table(path))
            dtype = DTYPES.get(config.dtype, config.dtype)
            level = dtype if scheme is None else f"{scheme.layout.upper()}-{scheme.bits}"
        elif level is None:
            level = FILE_TYPES.get(metadata.get("general.file_type", -1), "unknown")
        stats = [(file.name, file.stat()) for file in sorted(files)]
        versions = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
        family = metadata.get("general.architecture") or re.split("For|Model", config.architecture)[0].lower()
        details = {
            "parent_model": "",
            "format": "safetensors" if path.is_dir() else "gguf",
            "family": family,
            "families": [family],
            "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M",
            "quantization_level": level,
        }
        info = {
            "general.architecture": family,
            "general.parameter_count": count,
            f"{family}.block_count": config.num_layers,
            f"{family}.embedding_length": config.hidden_size,
        }
        return cls(
            sum(stat.st_size for _, stat in stats),
            hashlib.sha256(versions.encode()).hexdigest(),
            datetime.fromtimestamp(max(stat.st_mtime for _, stat in stats), UTC).isoformat(),
            details,
            info,
            writes,
        )
