"""Who computes a model: a family of this package, or the modules of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nanoengine.core.attention import AttentionSpec
from nanoengine.errors import UnsupportedModel, shown
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.models.architectures import UnsupportedArchitecture, read_model_config
from nanoengine.models.checkpoint import Checkpoint
from nanoengine.models.decoder import Decoder, attention_specs
from nanoengine.models.layers.factory import Factory
from nanoengine.models.loader import Quantizer, as_stored, check_weights, load_weights, num_parameters
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.names import WEIGHT_FILES, find_model
from nanoengine.models.quantization.packed_folder import PackedFolder
from nanoengine.models.safetensors_folder import SafetensorsFolder


class Implementation(Protocol):
    """Computes a model, whose description it has read."""

    config: ModelConfig

    @property
    def description(self) -> str:
        """Words of the start-up line, with a comma and a space behind them; empty for families."""
        ...

    def match(self, checkpoint: Checkpoint) -> int:
        """See from the headers of the weights that they are those of the model, and count them."""
        ...

    def attention_specs(self, config: ModelConfig) -> list[AttentionSpec]: ...

    def angles_of(self, max_len: int) -> tuple[object, ...]:
        """A key of everything beside the files that K/V depends on, if `max_len` is the longest sequence."""
        ...

    def load(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        factory: Factory,
        backend: AttentionBackend,
        quantize: Quantizer | None,
        use_tqdm: bool,
    ) -> Any:
        """The decoder with its weights."""
        ...


class FamilyModel:
    """A model of a family of this package."""

    description = ""

    def __init__(self, config: ModelConfig):
        self.config = config

    def match(self, checkpoint: Checkpoint) -> int:
        if isinstance(checkpoint, SafetensorsFolder | PackedFolder) and checkpoint.is_headless:
            self.config = dataclasses.replace(self.config, tie_word_embeddings=True)  # for embeddings: any head will do
        self.config = as_stored(self.config, checkpoint)
        check_weights(self.config, checkpoint)
        return num_parameters(self.config)

    def attention_specs(self, config: ModelConfig) -> list[AttentionSpec]:
        return attention_specs(config)

    def angles_of(self, max_len: int) -> tuple[object, ...]:
        return self.config.angles_of(max_len)

    def load(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        factory: Factory,
        backend: AttentionBackend,
        quantize: Quantizer | None,
        use_tqdm: bool,
    ) -> Decoder:
        model = Decoder(config, factory, backend)
        load_weights(model.checkpoint_tensors(), checkpoint, factory.dtype, quantize=quantize, use_tqdm=use_tqdm)
        return model


def choose_implementation(
    name: str, model_impl: str, table: Mapping[str, Any], scaling: Mapping[str, Any] | None, families: Sequence[Any]
) -> Implementation:
    """The implementation of the model called `name`, with the content `table` of its config.json.

    transformers computes only what no family here claims: a family that refuses a field has the last word.

    Raises:
        UnsupportedModel: neither computes it; the message says why.
    """
    refusal = "by transformers' modules: "
    if model_impl != "transformers":
        try:
            return FamilyModel(read_model_config(table, scaling, families))
        except UnsupportedArchitecture:
            if model_impl == "nanoengine" or not find_model(name).is_dir():
                raise
            stated = shown(table.get("architectures"))
            refusal = f"architectures is {stated}: no family here has it, and transformers' modules do not run here: "
    from nanoengine.models.transformers_backend.implementation import TransformersModel

    if scaling is not None:
        raise UnsupportedModel(f"{refusal}rope_scaling is not taken with them: change config.json")
    try:
        return TransformersModel(table, SafetensorsFolder(find_model(name, WEIGHT_FILES)))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{refusal}{error}") from error
