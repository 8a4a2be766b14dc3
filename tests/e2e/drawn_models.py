"""Models that are drawn for `one_number.py`: a shape, how its numbers are kept, and who computes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import block_encoder
from nanoengine import LLM
from nanoengine.kernels import flash_attn
from nanoengine.kernels.native.support import unsupported_reason
from nanoengine.kernels.quantized.tensor import QuantizedTensor
from nanoengine.models import capability as models
from nanoengine.models.description import Description
from nanoengine.models.quantization.at_load import quantizer
from tests.kernels.attention.stand_ins import PACKAGES, installed
from tests.models.families import SHAPES, family_checkpoint
from tests.support import backend_of, fill_kv_with_nan

MAX_LEN = 700


@dataclass(frozen=True)
class Model:
    """What is computed: a shape, how its numbers are kept, and who computes."""

    shape: str
    overrides: dict[str, Any]
    seed: int
    options: dict[str, Any]  # of the engine
    q4_k: bool = False
    package: str = ""  # of attention, for GPUs

    @property
    def is_exact(self) -> bool:
        return self.options["kernels"] == "native"

    @property
    def within(self) -> float:
        """Largest difference between log probabilities: sums that are added in another order are rounded otherwise."""
        return 0.0 if self.is_exact else 1e-4 if self.options["kv_cache_dtype"] == "auto" else 1e-2


THREE_GROUPS = "Llama with two windows and none"
WITHOUT = ("Phi3, partial, long factors", "Phi3, partial, short factors")
"""Shapes whose factors fit one size of a head alone, which native attention does not compute."""
REASON = unsupported_reason(torch.device("cpu"), torch.float32)
"""Why there are no native kernels."""


def draw_model(rng: random.Random) -> Model:
    """Heads that native attention computes, and rows that blocks of every format fill."""
    shape = rng.choice([*(shape for shape in SHAPES if shape not in WITHOUT), *[THREE_GROUPS] * 3])
    own = {} if shape == THREE_GROUPS else SHAPES[shape][1]
    overrides: dict[str, Any] = {"head_dim": rng.choice([32, 64]), "max_position_embeddings": MAX_LEN}
    if own.get("sliding_window"):
        overrides["sliding_window"] = rng.choice([1, 13, 40, 200, 300])
    if own.get("attention_chunk_size"):
        overrides["attention_chunk_size"] = rng.choice([1, 13, 40, 200, 300])
    kv_cache_dtype, seed = rng.choice(["auto", "auto", "int8"]), rng.randrange(1000)
    if rng.random() < 0.2 or REASON is not None:
        options = {"dtype": "float32", "kernels": "torch", "kv_cache_dtype": kv_cache_dtype, "quantization": None}
        if rng.random() < 0.5:
            return Model(shape, overrides, seed, options)
        options |= {"attention_backend": "flash_attn", "kv_cache_dtype": "auto"}
        shape = rng.choice([THREE_GROUPS, "Mistral, a window"])
        overrides = {key: own for key, own in overrides.items() if "chunk" not in key} | {"sliding_window": 40}
        return Model(shape, overrides, seed, options, package=rng.choice(PACKAGES))
    q4_k = rng.random() < 0.2 and 256 % own.get("num_attention_heads", 4) == 0
    if q4_k:  # blocks of 256
        overrides |= {"hidden_size": 256, "intermediate_size": 256}
    options = {
        "dtype": rng.choice(["float32", "bfloat16", "bfloat16"]),
        "kernels": "native",
        "kv_cache_dtype": kv_cache_dtype,
        "quantization": "int8" if q4_k else rng.choice([None, None, "int8", "int4", "int4-128"]),
        "activation_dtype": rng.choice(["auto", "int8", "int16", "bfloat16", "float32"]),
    }
    return Model(shape, overrides, seed, options, q4_k)


@contextmanager
def checkpoint(folder: Path, model: Model) -> Iterator[Path]:
    """A folder with the model; inside, its config is what the shape says."""
    if model.shape != THREE_GROUPS:
        yield family_checkpoint(folder, model.shape, seed=model.seed, **model.overrides)
        return
    describe = models.describe

    def described(*where: Path) -> Description:
        """Six layers: two see all, two a window that is smaller than a block of 16, two a longer one."""
        found = describe(*where)
        layer = found.config.layer(0)
        layers = (replace(layer, window=9), layer, replace(layer, window=14))
        return replace(found, config=replace(found.config, layers=layers))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "describe", described)
        yield family_checkpoint(folder, "Llama", seed=model.seed, num_hidden_layers=6, **model.overrides)


def in_q4_k(values: Tensor) -> QuantizedTensor:
    """Rows that no blocks fill have 8 bits."""
    return block_encoder.encode(values, "Q4_K") if values.shape[1] % 32 == 0 else quantizer("int8")(values)


@contextmanager
def opened(model: Model, folder: Path, **options: Any) -> Iterator[LLM]:
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if model.q4_k:
            patch.setattr(models, "quantizer", lambda *_: in_q4_k)
        if model.package:
            stack.enter_context(installed(model.package, exact=True))
            patch.setattr(flash_attn, "triton_unsupported_reason", lambda _: "the interpreter is slow")
        options = {"max_model_len": MAX_LEN, "device": "cpu", "enable_lora": True, **model.options, **options}
        llm = stack.enter_context(LLM(str(folder), use_tqdm=False, **options))
        if llm.built.models.model_config.attention_layers:
            assert backend_of(llm).name == model.options.get("attention_backend", model.options["kernels"])
        fill_kv_with_nan(llm)
        yield llm
