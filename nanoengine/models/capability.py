"""Families of models, the formats of their files, and quantization, as a capability of the engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from nanoengine.core.capability import Capability
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.startup import Startup
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.kernels.operations import Kernels
from nanoengine.kernels.triton.launch import float8_unsupported_reason
from nanoengine.models.checkpoint import Checkpoint
from nanoengine.models.default_sampling import default_sampling
from nanoengine.models.description import describe
from nanoengine.models.implementation import Implementation, Weights
from nanoengine.models.layers.factory import Factory
from nanoengine.models.loader import Quantizer, open_checkpoint, weight_bytes
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.model_impl import choose_implementation
from nanoengine.models.names import WEIGHT_FILES, find_model
from nanoengine.models.options import ModelOptions
from nanoengine.models.placement import check_room_for_weights
from nanoengine.models.quantization.at_load import quantizer
from nanoengine.models.tokenizer import ModelTokenizer
from nanoengine.plugins import PluginOptions


class Models(Capability):
    """The capability of models. `describe` and `policy` set its attributes, which `LLM` and the server read."""

    options = ModelOptions
    checkpoint: Checkpoint
    implementation: Implementation
    metadata: Mapping[str, Any]
    """Of a GGUF file; empty for a folder."""
    quantization: str | None
    model_config: ModelConfig
    num_parameters: int
    tokenizer: ModelTokenizer
    default_sampling: Mapping[str, Any]
    """Defaults of sampling parameters: see `default_sampling`."""

    def describe(self, startup: Startup) -> tuple[ModelConfig, ModelTokenizer, Sequence[int]]:
        """Read the description of the model; its sizes are checked against the headers of the weights before they cost memory."""
        config, options = startup.config, startup.config.of(ModelOptions)
        tokenizer = None if options.tokenizer is None else find_model(str(options.tokenizer))
        scaling = None if options.rope_scaling is None else json.loads(str(options.rope_scaling))
        template, families = cast("str | None", options.chat_template), config.of(PluginOptions).families

        def read(table: Mapping[str, Any]) -> ModelConfig:
            self.implementation = choose_implementation(config.model, options.model_impl, table, scaling, families)
            return self.implementation.config

        description = describe(find_model(config.model), tokenizer, template, read)
        path = find_model(config.model, WEIGHT_FILES)  # the description is valid: now the weights are fetched
        self.checkpoint, self.quantization = open_checkpoint(path, description.gguf), options.quantization
        self.num_parameters = self.implementation.match(self.checkpoint)
        startup.layers_library, said = self.implementation.description, self.implementation.config
        if (config.max_model_len or 0) > said.max_position_embeddings:
            said = dataclasses.replace(said, max_position_embeddings=said.longest)
        self.model_config = said.within(config.max_model_len or said.max_position_embeddings)
        layers = map(self.model_config.layer, self.model_config.attention_layers)
        startup.path = path
        self.metadata = startup.metadata = {} if description.gguf is None else description.gguf.metadata
        startup.weights_key = self._weights
        startup.attention_specs = self.implementation.attention_specs(self.model_config)
        startup.head_dims = self.model_config.head_dims
        startup.windows = [layer.window for layer in layers]
        startup.has_chunks = said.has_chunks
        startup.state_shapes = None if said.states is None else said.states.shapes
        self.tokenizer, self._advised = description.tokenizer, description.advised_sampling
        return self.model_config, description.tokenizer, description.eos_token_ids

    def _weights(self, max_len: int) -> tuple[object, ...]:
        """A key of all that determines K/V beside the description, if no sequence is longer than `max_len`."""
        return self.checkpoint.fingerprint(), self.quantization, self.implementation.angles_of(max_len)

    def model(self, startup: Startup) -> Any:
        device, quantization = startup.device.torch_device, self.quantization
        quantize: Quantizer | None = None
        if quantization is not None:
            reason: str | None = "the native and torch kernels know no products of them"
            if startup.kernels.name == "triton":
                reason = float8_unsupported_reason(device)
            quantize = quantizer(quantization, reason)
        if startup.kernels.name == "native":
            num_bytes = weight_bytes(self.checkpoint, startup.dtype, quantization)
        else:  # on a CPU, other kernels compute with dense weights
            num_bytes = self.num_parameters * startup.dtype.itemsize
        check_room_for_weights(num_bytes // startup.num_ranks, device)
        kernels, backend = startup.kernels, startup.backend
        if not isinstance(kernels, Kernels) or not isinstance(backend, AttentionBackend):
            raise InvalidConfig("families of models need the capability kernels, which is not installed")
        factory = (startup.factory or Factory)(kernels, startup.dtype, device)
        weights = Weights(self.checkpoint, quantize, startup.use_tqdm)
        model = self.implementation.load(weights, self.model_config, factory, backend)
        startup.matrices = model.matrices
        startup.layers_library = self.implementation.description
        return model

    def before_pool(self, startup: Startup) -> None:
        if self.model_config.states is not None and not startup.num_state_layers:
            raise InvalidConfig("models with states need the capability kv groups, which is not installed")

    def policy(self, startup: Startup) -> None:
        _ = self.tokenizer.fast  # a thread may build it until here; its errors are those of the start
        self.default_sampling = default_sampling(self._advised, type(startup.default_params))
        startup.default_params = dataclasses.replace(startup.default_params, **self.default_sampling)
