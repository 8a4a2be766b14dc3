"""A model by a family of this package, from its description to the decoder: what the transformers backend does otherwise."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from nanoengine.core.attention import AttentionSpec
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.models.checkpoint import Checkpoint
from nanoengine.models.decoder import Decoder, attention_specs
from nanoengine.models.layers.factory import Factory
from nanoengine.models.loader import Quantizer, as_stored, check_weights, load_weights, num_parameters
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.quantization.packed_folder import PackedFolder
from nanoengine.models.safetensors_folder import SafetensorsFolder


class Weights(NamedTuple):
    """Where weights come from, and what becomes of them."""

    checkpoint: Checkpoint
    quantize: Quantizer | None
    use_tqdm: bool


class Implementation:
    """A model of a family of this package; `TransformersModel` overrides every method."""

    @property
    def description(self) -> str:
        """Words of the start-up line, with a comma and a space behind them."""
        return ""

    def __init__(self, config: ModelConfig):
        self.config = config

    def match(self, checkpoint: Checkpoint) -> int:
        """See from the headers of the weights that they are those of the model, and count them."""
        if isinstance(checkpoint, SafetensorsFolder | PackedFolder) and checkpoint.is_headless:
            self.config = dataclasses.replace(self.config, tie_word_embeddings=True)  # for embeddings: any head will do
        self.config = as_stored(self.config, checkpoint)
        check_weights(self.config, checkpoint)
        return num_parameters(self.config)

    def attention_specs(self, config: ModelConfig) -> list[AttentionSpec]:
        return attention_specs(config)

    def angles_of(self, max_len: int) -> tuple[object, ...]:
        """A key of everything beside the files that K/V depends on, if `max_len` is the longest sequence."""
        return self.config.angles_of(max_len)

    def load(self, weights: Weights, config: ModelConfig, factory: Factory, backend: AttentionBackend) -> Any:
        """The decoder with its weights."""
        model, (checkpoint, quantize, use_tqdm) = Decoder(config, factory, backend), weights
        load_weights(model.checkpoint_tensors(), checkpoint, factory.dtype, quantize=quantize, use_tqdm=use_tqdm)
        return model
