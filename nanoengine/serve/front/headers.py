"""What the headers of a model's files say: its card for clients, and the memory that it needs. No weight is read, and no torch
is imported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from nanoengine.core.config import EngineConfig
from nanoengine.errors import ModelNotFound
from nanoengine.models.architectures import read_model_config
from nanoengine.models.description import config_table
from nanoengine.models.fetch import DOWNLOADS
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.gguf.translate import hf_config
from nanoengine.models.inventory import repositories
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.names import WEIGHT_FILES, find_model, gguf_parts
from nanoengine.models.tokenizer import HFTokenizer
from nanoengine.serve.front.catalogue import Source
from nanoengine.serve.server.model_card import ModelCard

MAX_BLOCK = 16
"""Tokens of a block of the K/V cache on a CPU, where the options do not say another number."""


@dataclass(frozen=True, slots=True)
class Headers:
    """Facts of a model.

    Attributes:
        card: for clients.
        config: its shape.
        template: of chats; empty: it has none.
    """

    card: ModelCard
    config: ModelConfig
    template: str

    def max_model_len(self, config: EngineConfig) -> int:
        """Tokens of the longest sequence, if the K/V pool holds it."""
        return config.max_model_len or self.config.max_position_embeddings

    def kv_bytes(self, config: EngineConfig) -> int:
        """Bytes of the K/V pool: of its blocks, or of as many sequences as can run, each as long as can be."""
        block = config.block_size or MAX_BLOCK
        tokens = config.max_num_seqs * (self.max_model_len(config) + block)
        if config.num_kv_blocks is not None:
            tokens = config.num_kv_blocks * block
        return tokens * self.config.kv_bytes_per_token(4 if self.config.dtype == "float32" else 2)

    def weight_bytes(self, config: EngineConfig) -> int:
        """Bytes of the weights in memory: those of their files, twice as many where 16 bits become float32."""
        is_wider = config.dtype == "float32" and self.config.dtype in ("bfloat16", "float16")
        return self.card.size * (2 if is_wider and self.card.details["format"] == "safetensors" else 1)


def read_headers(source: Source) -> Headers:
    """The facts of a model on this machine.

    Raises:
        ModelNotFound: it is not here yet.
        UnsupportedModel, InvalidWeights: its files.
    """
    where: str | None = source.model
    if not Path(source.model).exists() and source.model not in ("demo", *DOWNLOADS):
        where = dict(repositories()).get(source.model)
    if where is None:
        raise ModelNotFound(f"{source.model} is not on this machine yet")
    path = find_model(where)
    if not path.is_dir():
        file = GGUFFile.open(path)
        config, count = read_model_config(hf_config(file)), sum(math.prod(one.shape) for one in file.tensors.values())
        card = ModelCard.of_files(path, gguf_parts(path), config, file.metadata, count)
        return Headers(card, config, str(file.metadata.get("tokenizer.chat_template", "")))
    config, count = read_model_config(config_table(path)), 0
    files = [file for pattern in WEIGHT_FILES for file in path.glob(pattern)]
    if not files:
        raise ModelNotFound(f"{path} holds no {', '.join(WEIGHT_FILES)}: its weights are not here yet")
    for name in files:
        with safe_open(name, framework="numpy") as weights:
            count += sum(math.prod(weights.get_slice(key).get_shape()) for key in weights.keys())  # noqa: SIM118
    templates = HFTokenizer(path).chat_templates
    return Headers(ModelCard.of_files(path, files, config, {}, count), config, templates.get("default", ""))
