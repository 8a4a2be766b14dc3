"""Implementation: a model of a family, from its description to the decoder; the transformers backend overrides it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from nanoengine.core.attention import AttentionSpec
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.models.checkpoint import Checkpoint
from nanoengine.models.decoder import Decoder
from nanoengine.models.layers.attention import attention_spec
from nanoengine.models.layers.factory import Factory
from nanoengine.models.loader import Quantizer, as_stored, check_weights, load_weights, num_parameters
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.safetensors_folder import SafetensorsFolder


class Weights(NamedTuple):
    """The arguments of loading: source, quantizer and progress bar."""

    checkpoint: Checkpoint
    quantize: Quantizer | None
    use_tqdm: bool


class Implementation:
    """A model of a family of this package; `TransformersModel` overrides every method."""

    description = ""
    """A part of the start-up line, which ends with a comma and a space."""

    def __init__(self, config: ModelConfig):
        self.config = config

    def match(self, checkpoint: Checkpoint) -> int:
        """Compare the headers of the weights with the model; return the number of weights."""
        if isinstance(checkpoint, SafetensorsFolder) and checkpoint.is_headless:
            # Of an embedding model: the head is not used.
            self.config = dataclasses.replace(self.config, tie_word_embeddings=True)
        self.config = as_stored(self.config, checkpoint)
        check_weights(self.config, checkpoint)
        return num_parameters(self.config)

    def attention_specs(self, config: ModelConfig) -> list[AttentionSpec]:
        return [attention_spec(config, number) for number in range(config.num_layers)]

    def angles_of(self, max_len: int) -> tuple[object, ...]:
        """A key of all that determines K/V beside the files, if `max_len` is the limit of sequences."""
        return self.config.angles_of(max_len)

    def load(self, weights: Weights, config: ModelConfig, factory: Factory, backend: AttentionBackend) -> Any:
        """The decoder with its weights."""
        model, (checkpoint, quantize, use_tqdm) = Decoder(config, factory, backend), weights
        load_weights(model.checkpoint_tensors(), checkpoint, factory.dtype, quantize=quantize, use_tqdm=use_tqdm)
        return model
