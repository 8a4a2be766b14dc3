"""A model folder that the transformers backend computes: from its config.json to a decoder with weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nanoengine.core.attention import AttentionSpec
from nanoengine.core.config import DTYPES
from nanoengine.errors import InvalidWeights, UnsupportedModel, shown
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.models.architectures import LENGTHS
from nanoengine.models.checkpoint import Checkpoint, TensorHeader
from nanoengine.models.config_fields import MAX_POSITIONS
from nanoengine.models.implementation import Implementation, Weights
from nanoengine.models.layers.factory import Factory
from nanoengine.models.model_config import LayerConfig, ModelConfig
from nanoengine.models.safetensors_folder import SafetensorsFolder
from nanoengine.models.transformers_backend.bounds import bounded_by, checked, named
from nanoengine.models.transformers_backend.decoder import TransformersDecoder
from nanoengine.models.transformers_backend.interface import COMPUTES_ITSELF, PROBE, register
from nanoengine.models.transformers_backend.loading import load
from nanoengine.models.transformers_backend.probe import Probe, probe

HEAD_MULTIPLE = 32
"""Heads are padded to a multiple of it for the native kernels."""


class TransformersModel(Implementation):
    """A folder whose architecture transformers computes.

    Args:
        table: the content of its config.json.
        open_checkpoint: opens its weights, of which the headers are read.

    Raises:
        UnsupportedModel: transformers has no such decoder, or it has an operation that is not computed; the message names it.
    """

    def __init__(self, table: Mapping[str, Any], open_checkpoint: Callable[[], SafetensorsFolder]):
        self.transformers = register()
        self.description = f"layers by transformers {self.transformers.__version__}, "
        self._check_names(table)  # before weights are fetched, which may be hundreds of gigabytes
        headers = list(open_checkpoint().headers())
        with named(UnsupportedModel, "transformers cannot build it"):
            self.kind, self.hf_config = self._read(checked(table, len(headers)))
            self.probe = self._probe(headers)
            self.config = self._describe()

    def _check_names(self, table: Mapping[str, Any]) -> None:
        """Raises UnsupportedModel unless transformers has such a decoder."""
        auto, (model_type, name) = self.transformers.models.auto, _names(table)
        is_known = model_type in auto.configuration_auto.CONFIG_MAPPING
        decoders = auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
        is_decoder = name in ([decoders] if isinstance(decoders, str) else decoders) or "text_config" in table
        if name.endswith("ForCausalLM"):  # some decoders are in no table of transformers
            config_kind = getattr(getattr(self.transformers, name, None), "config_class", None)
            is_decoder |= getattr(config_kind, "model_type", None) == model_type
        # Classes that came with remote code, and have another name in transformers, are called as their model_type.
        is_alias = name not in dir(self.transformers) and _letters(name).startswith(_letters(model_type))
        if not is_known or not (is_decoder or is_alias or table.get("architectures") is None):
            raise UnsupportedModel(
                f"transformers {self.transformers.__version__} has no decoder {shown(name)} of model_type {shown(model_type)}, "
                "and code in a model's folder is never run"
            )
        if name.endswith("ForCausalLM"):
            self._refuse_states(getattr(self.transformers, name, None))

    def _read(self, table: dict[str, Any]) -> tuple[Any, Any]:
        """The class of the decoder and its config; of a multimodal model, those of its text part."""
        transformers, auto, (model_type, name) = self.transformers, self.transformers.models.auto, _names(table)
        kind = getattr(transformers, name, None) if name.endswith("ForCausalLM") else None
        config = auto.configuration_auto.CONFIG_MAPPING[model_type].from_dict(table)
        text = config.get_text_config(decoder=True)
        if kind is None or not isinstance(text, kind.config_class):
            kind = auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
            kind = kind or getattr(transformers, f"{type(text).__name__.removesuffix('Config')}ForCausalLM", None)
            if text is config and name in dir(transformers) and name != getattr(kind, "__name__", None):
                kind = None  # it is not a text decoder
        if text is not config:
            text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
        if kind is None:
            raise UnsupportedModel(f"{shown(name)} of model_type {model_type} is no decoder of text in transformers")
        if getattr(text, "is_encoder_decoder", False) and "ForCausalLM" not in name:
            raise UnsupportedModel(f"{shown(name)} is an encoder with a decoder: decoders alone are computed")
        self._refuse_states(kind)
        if hasattr(text, "is_decoder"):
            text.is_decoder = True
        # Modules that are built for a probe change it in the config.
        dtype = str(getattr(text, "dtype", None) or getattr(config, "dtype", None)).removeprefix("torch.")
        self.dtype = dtype if dtype in DTYPES else "float32"
        text._attn_implementation = PROBE
        text._experts_implementation = "batched_mm"  # in a probe: slow, but without a synchronization
        return kind, text

    @staticmethod
    def _refuse_states(kind: Any) -> None:
        if getattr(kind, "_is_stateful", False):
            raise UnsupportedModel(
                f"{kind.__name__} has layers with recurrent states, which families of this package alone compute"
            )

    def _probe(self, headers: Sequence[TensorHeader]) -> Probe:
        def build() -> Any:
            with torch.device("meta"):
                return self.kind._from_config(self.hf_config, dtype=torch.float32).eval()

        try:
            with bounded_by(headers), torch.device("meta"):
                return probe(build())
        except UnsupportedModel:
            raise
        except Exception as error:  # it looks at numbers, of which "meta" has none
            if isinstance(error, KeyError) and PROBE in str(error):
                raise UnsupportedModel(f"{self.kind.__name__} {COMPUTES_ITSELF}") from error
        with bounded_by(headers), torch.device("cpu"):
            # Zeros use no memory before the first write.
            return probe(build()._apply(lambda tensor: torch.zeros_like(tensor, device="cpu")), "cpu")

    def _describe(self) -> ModelConfig:
        calls, config = self.probe.calls, self.hf_config
        kv_heads, name = max(call.num_kv_heads for call in calls), self.kind.__name__
        for call in calls:
            if kv_heads % call.num_kv_heads or call.num_heads % kv_heads:
                raise UnsupportedModel(f"{name} has layers of {call.num_kv_heads} and of {kv_heads} heads of keys")
        if len({call.spec.chunked for call in calls if call.spec.window}) > 1:
            raise UnsupportedModel(f"{name} has both chunks and windows")
        stated = (getattr(config, key, None) for key in ("max_position_embeddings", *LENGTHS))
        lengths = [length for length in stated if isinstance(length, int) and length > 0]  # the first counts
        widest = max(call.key_dim for call in calls)
        return ModelConfig(
            architecture=name,
            vocab_size=self.probe.vocab_size,
            hidden_size=self.probe.hidden_size,
            intermediate_size=self.probe.hidden_size,
            num_layers=len(calls),
            num_heads=max(call.num_heads for call in calls),
            num_kv_heads=kv_heads,
            head_dim=-(-widest // HEAD_MULTIPLE) * HEAD_MULTIPLE,
            max_position_embeddings=min(lengths[0] if lengths else 2048, MAX_POSITIONS),
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            dtype=self.dtype,
            layers=tuple(LayerConfig(rope=None, window=call.spec.window) for call in calls),
            has_chunks=any(call.spec.chunked for call in calls),
            linears=tuple(self.probe.linears),
        )

    def match(self, checkpoint: Checkpoint) -> int:
        return sum(math.prod(header.shape) for header in checkpoint.headers())

    def attention_specs(self, config: ModelConfig) -> list[AttentionSpec]:
        return [call.spec_with(config.layer(number).window) for number, call in enumerate(self.probe.calls)]

    def angles_of(self, max_len: int) -> tuple[object, ...]:
        """See `Implementation.angles_of`."""
        return "transformers", self.transformers.__version__, max_len

    def load(self, weights: Weights, config: ModelConfig, factory: Factory, backend: AttentionBackend) -> Any:
        replaced = self.probe.replacements
        with named(InvalidWeights, f"transformers cannot load {weights.checkpoint.location}"):
            model, groups = load(self.kind, self.hf_config, replaced, weights, factory)
            numbers = f"{sum(len(group.members) for group in groups)} products, {len(replaced.norms)} norms"
            mixtures = f", {len(replaced.experts)} mixtures of experts" if replaced.experts else ""
            parts = f" (attention, {numbers}{mixtures} by nanoengine), "
            self.description = self.description.removesuffix(", ") + parts
            return TransformersDecoder(model, groups, self.probe.calls, config, factory, backend)


def _names(table: Mapping[str, Any]) -> tuple[str, str]:
    """The model_type and the architecture of a config.json; "" without an architecture."""
    stated = table.get("architectures")
    name = next((each for each in stated if isinstance(each, str)), "") if isinstance(stated, list) else ""
    return str(table.get("model_type")), name


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
