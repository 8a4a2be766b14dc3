"""Building a model: in its dtype from the start, with torch's own settings left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanoengine.attention.backend import AttentionSpec
from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.config import ARCHITECTURES
from nanoengine.kernels.native_kernels import NativeKernels
from nanoengine.kernels.native_operations import why_not
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.models.registry import MODELS, attention_specs, build_model
from tests.support import TOY, angles_at

CONFIG = replace(TOY, tie_word_embeddings=False, attention_bias=True)

CPU = torch.device("cpu")


def test_every_architecture_that_configs_may_name_has_a_class() -> None:
    assert set(MODELS) == set(ARCHITECTURES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_is_built_in_its_dtype_without_gradients(dtype: torch.dtype) -> None:
    model = build_model(CONFIG, TorchKernels(), TorchAttention(4), dtype, torch.device("cpu"))
    tensors = model.checkpoint_tensors().values()
    assert {tensor.dtype for tensor in tensors} == {dtype}  # type: ignore[attr-defined]
    assert not any(tensor.requires_grad for tensor in tensors)  # type: ignore[attr-defined]
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_weights_are_of_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    reason = why_not(CPU, dtype)
    if reason is not None:
        pytest.skip(f"no native kernels: {reason}")
    model = build_model(CONFIG, NativeKernels(), TorchAttention(4), dtype, CPU)
    embedded = model.embed_tokens(torch.tensor([1]))
    layer = model.layers[0]
    hidden, residual = layer.mlp(layer.post_attention_layernorm, embedded, embedded.clone())
    assert embedded.dtype == hidden.dtype == residual.dtype == dtype
    assert model.lm_head(embedded).dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_a_model_is_built_on_its_device() -> None:
    model = build_model(CONFIG, TorchKernels(), TorchAttention(4), torch.float32, torch.device("meta"))
    assert {tensor.device.type for tensor in model.checkpoint_tensors().values()} == {"meta"}  # type: ignore[attr-defined]


def test_torchs_default_dtype_and_device_count_for_nothing() -> None:
    """A model is of the dtype and on the device that it is built for, to the angles of its rotation."""
    positions = torch.tensor([30_000])
    expected = angles_at(positions, CONFIG.head_dim, CONFIG.rope_theta)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = build_model(CONFIG, TorchKernels(), TorchAttention(4), torch.float16, CPU)
            model.prepare(30_001)
    finally:
        torch.set_default_dtype(torch.float32)
    places = {(place.device.type, place.dtype) for place in model.checkpoint_tensors().values()}  # type: ignore[attr-defined]
    assert places == {("cpu", torch.float16)}
    for angles, right in zip(model.rotary(positions), expected, strict=True):
        assert torch.equal(angles, right)


def test_a_model_states_what_each_of_its_layers_asks_of_attention() -> None:
    specs = attention_specs(replace(CONFIG, num_layers=3, head_dim=16))
    assert specs == [AttentionSpec(scale=0.25)] * 3
    model = build_model(CONFIG, TorchKernels(), TorchAttention(4), torch.float32, CPU)
    assert [layer.self_attn.attention.spec for layer in model.layers] == attention_specs(CONFIG)
