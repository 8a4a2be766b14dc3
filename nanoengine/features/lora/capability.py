"""Adapters as a capability of the engine."""

from __future__ import annotations

from typing import Any, cast

from nanoengine.core.capability import Capability
from nanoengine.core.startup import Startup
from nanoengine.features.lora.adapters import Adapters
from nanoengine.features.lora.native_products import NativeProducts
from nanoengine.features.lora.options import LoRAOptions
from nanoengine.features.lora.places import find_places
from nanoengine.features.lora.products import Products
from nanoengine.features.lora.runner_part import AdapterPart
from nanoengine.kernels.native.operations import NativeKernels
from nanoengine.kernels.operations import Kernels
from nanoengine.models.model_config import ModelConfig


class LoRA(Capability):
    options = LoRAOptions
    adapters: Adapters | None = None
    """Set by `policy`; None without adapters."""

    _products: Products | None = None

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
            from nanoengine.kernels.recording.recorded_steps import RecordedSteps  # who has recorded steps has it

            assert isinstance(runner.recorder, RecordedSteps)
            runner.recorder.variant = lambda: products.is_used

    def _new_products(self, startup: Startup) -> Products:
        config, model, kernels = startup.model_config, cast(Any, startup.model), startup.kernels
        assert isinstance(config, ModelConfig)
        assert isinstance(kernels, Kernels)
        places, matrices = find_places(config, getattr(model, "linear_rows", {})), model.matrices
        of_rank = startup.kept_rows
        kept = {number: of_rank[id(own)] for number, own in enumerate(matrices) if id(own) in of_rank}
        if isinstance(kernels, NativeKernels):
            limits = startup.config.of(LoRAOptions).max_loras, startup.config.max_num_batched_tokens
            return NativeProducts(kernels, matrices, places, max_adapters=limits[0], max_rows=limits[1], kept=kept)
        return Products(kernels, matrices, places, startup.device.torch_device, kept)

    def policy(self, startup: Startup) -> None:
        own, config = startup.config.of(LoRAOptions), startup.model_config
        if own.enable_lora:
            assert isinstance(config, ModelConfig)
            shapes = {name: (place.count, place.inputs) for name, place in find_places(config).items()}
            self.adapters = Adapters(own, shapes)
            for name, _, path in (module.partition("=") for module in own.lora_modules or ()):
                self.adapters.load(name, path, replaces=False)
            startup.parts.append(self.adapters)

    def describe_itself(self, startup: Startup) -> str | None:
        own = startup.config.of(LoRAOptions)
        return f"up to {own.max_loras} adapters of rank {own.max_lora_rank}" if own.enable_lora else None
