"""Adapters as a capability of the engine."""

from __future__ import annotations

from typing import Any, cast

from nanoengine.core.capability import Capability
from nanoengine.core.startup import Startup
from nanoengine.features.lora.adapted_products import AdaptedProducts
from nanoengine.features.lora.adapters import Adapters
from nanoengine.features.lora.layer_map import find_linear_layers
from nanoengine.features.lora.native_products import NativeAdaptedProducts
from nanoengine.features.lora.options import LoRAOptions
from nanoengine.features.lora.runner_part import AdapterPart
from nanoengine.kernels.native.operations import NativeKernels
from nanoengine.kernels.operations import Kernels
from nanoengine.models.model_config import ModelConfig


class LoRA(Capability):
    options = LoRAOptions
    adapters: Adapters | None = None
    """Set by `policy`; None without `enable_lora`."""

    _products: AdaptedProducts | None = None

    def runner(self, startup: Startup) -> None:
        if not startup.config.of(LoRAOptions).enable_lora:
            return
        runner = startup.runner
        if self._products is None:
            self._products = self._new_products(startup)
            self._products.install()
        products = self._products
        runner.parts.append(AdapterPart(products, startup.num_rows))
        if runner.recorder is not None:
            from nanoengine.kernels.recording.recorded_steps import RecordedSteps  # a recorder comes from there

            assert isinstance(runner.recorder, RecordedSteps)
            runner.recorder.variant = lambda: products.is_used

    def _new_products(self, startup: Startup) -> AdaptedProducts:
        config, model, kernels = startup.model_config, cast(Any, startup.model), startup.kernels
        assert isinstance(config, ModelConfig)
        assert isinstance(kernels, Kernels)
        layers, matrices = find_linear_layers(config, getattr(model, "linear_rows", {})), model.matrices
        of_rank = startup.rows_of_rank
        rows_of_rank = {number: of_rank[id(weight)] for number, weight in enumerate(matrices) if id(weight) in of_rank}
        if isinstance(kernels, NativeKernels):
            limits = startup.config.of(LoRAOptions).max_loras, startup.config.max_num_batched_tokens
            return NativeAdaptedProducts(kernels, matrices, layers, *limits, rows_of_rank)
        return AdaptedProducts(kernels, matrices, layers, startup.device.torch_device, rows_of_rank)

    def policy(self, startup: Startup) -> None:
        options, config = startup.config.of(LoRAOptions), startup.model_config
        if options.enable_lora:
            assert isinstance(config, ModelConfig)
            shapes = {name: (layer.count, layer.inputs) for name, layer in find_linear_layers(config).items()}
            self.adapters = Adapters(options, shapes)
            for name, _, path in (module.partition("=") for module in options.lora_modules or ()):
                self.adapters.load(name, path, replaces=False)
            startup.parts.append(self.adapters)

    def describe_itself(self, startup: Startup) -> str | None:
        options = startup.config.of(LoRAOptions)
        return f"up to {options.max_loras} adapters of rank {options.max_lora_rank}" if options.enable_lora else None
