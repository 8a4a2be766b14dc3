"""The decoder in the shapes of Qwen3 against transformers: the logits after every token, not the look of the text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from nanoengine import LLM
from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.core.attention import AttentionSpec
from nanoengine.kernels.native_kernels import NativeKernels
from nanoengine.kernels.native_operations import unsupported_reason
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.models.architectures import read_model_config
from nanoengine.models.decoder import attention_specs, build_model
from tests.support import (
    TOY,
    angles_at,
    fill_kv_with_nan,
    forced_logits,
    model_runner,
    num_weights,
    reference_logits,
    reference_model,
    tensors_of,
    tiny_checkpoint,
)

TOKENS = torch.randint(0, 250, (75,), generator=torch.Generator().manual_seed(0)).tolist()

SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "no groups": {"num_key_value_heads": 4},
    "group of 3": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "group of 8": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "group of 3 heads of 64": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64},
    "group of 8 heads of 32": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32},
    "one head of 256": {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 256},
    "heads of 96 with bias": {"attention_bias": True, "head_dim": 96},
    "heads wider than the model": {"hidden_size": 20, "num_attention_heads": 4, "head_dim": 32},
    "heads narrower than the model": {"hidden_size": 100, "num_attention_heads": 2, "head_dim": 6},
    "attention bias": {"attention_bias": True},
    "attention bias, untied, one layer": {"attention_bias": True, "tie_word_embeddings": False, "num_hidden_layers": 1},
    "odd sizes": {
        "vocab_size": 257,
        "hidden_size": 37,
        "intermediate_size": 53,
        "head_dim": 10,
        "num_hidden_layers": 3,
    },
    "other norm": {"rms_norm_eps": 0.1},
    "other rope": {"rope_theta": 1e6},
}


def engine(folder: Path, **options: Any) -> LLM:
    """An engine whose KV pool is full of NaN."""
    llm = LLM(str(folder), use_tqdm=False, **{"num_kv_blocks": 100, "device": "cpu", "dtype": "float32"} | options)
    fill_kv_with_nan(llm)
    return llm


@pytest.fixture(scope="module", params=[16, 32], ids=["attention in torch", "native attention"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads that torch alone can compute, or with such as both can."""
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3, head_dim=request.param)


@pytest.fixture(scope="module")
def expected(tiny: Path) -> torch.Tensor:
    return reference_logits(reference_model(tiny), TOKENS)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_at_every_position_are_those_of_transformers(
    tmp_path: Path, shape: dict[str, Any], kernels: str
) -> None:
    folder = tiny_checkpoint(tmp_path, seed=len(shape), **shape)
    right = reference_logits(reference_model(folder), TOKENS)
    assert right.std() > 0.3  # a model whose logits differ, so that 1e-4 means something
    with engine(folder, kernels=kernels) as llm:
        logits = forced_logits(llm, TOKENS, num_prompt_tokens=40, chunk=40)
    torch.testing.assert_close(logits, right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 2, 15, 16, 17, 31, 75])
def test_any_chunk_size_gives_the_same_logits(tiny: Path, expected: torch.Tensor, chunk: int) -> None:
    with engine(tiny) as llm:
        torch.testing.assert_close(forced_logits(llm, TOKENS, 75, chunk), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 256])
def test_any_block_size_gives_the_same_logits(tiny: Path, expected: torch.Tensor, block_size: int) -> None:
    with engine(tiny, block_size=block_size) as llm:
        torch.testing.assert_close(forced_logits(llm, TOKENS, 33, 10), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17, 32])
def test_decode_may_begin_on_either_side_of_a_block_boundary(
    tiny: Path, expected: torch.Tensor, num_prompt_tokens: int
) -> None:
    with engine(tiny) as llm:
        logits = forced_logits(llm, TOKENS[:40], num_prompt_tokens, num_prompt_tokens)
    torch.testing.assert_close(logits, expected[:40], rtol=0, atol=1e-4)


def test_bfloat16_is_not_worse_than_transformers_in_bfloat16(tiny: Path, expected: torch.Tensor) -> None:
    with torch.inference_mode():
        theirs = (
            AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).eval()(torch.tensor([TOKENS])).logits[0]
        )
    with engine(tiny, dtype="bfloat16") as llm:
        ours = forced_logits(llm, TOKENS, 40, 40)
    assert ours.dtype == torch.float32
    assert 0 < (ours - expected).square().mean() <= 1.5**2 * (theirs.float() - expected).square().mean()


# ---- large positions


@pytest.mark.parametrize(("theta", "head_dim"), [(1e6, 128), (1e4, 64), (5e6, 10)])
def test_rotary_angles_up_to_40_960_positions_are_those_of_transformers(theta: float, head_dim: int) -> None:
    config = Qwen3Config(
        head_dim=head_dim, max_position_embeddings=40960, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    positions = torch.cat([torch.arange(0, 40960, 77), torch.arange(40900, 40960)])
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = angles_at(positions, head_dim, theta)
    for mine, theirs in zip(ours, (cos, sin), strict=True):
        torch.testing.assert_close(mine[:, 0], theirs[0, :, : head_dim // 2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("head_dim", [16, 64])
def test_logits_of_a_long_text_are_those_of_transformers(tmp_path: Path, head_dim: int) -> None:
    """The last chunk and the last decoded tokens of 3,000, far beyond the positions that rotate slowly."""
    options = {"max_position_embeddings": 40960, "rope_theta": 1e6, "num_hidden_layers": 1, "head_dim": head_dim}
    folder = tiny_checkpoint(tmp_path, **options)
    tokens = torch.randint(0, 250, (3000,), generator=torch.Generator().manual_seed(1)).tolist()
    right = reference_logits(reference_model(folder), tokens)
    with engine(folder, num_kv_blocks=200) as llm:
        logits = forced_logits(llm, tokens, num_prompt_tokens=2990, chunk=1000)
    torch.testing.assert_close(logits, right, rtol=0, atol=1e-4)


# ---- the whole


def test_the_config_counts_the_parameters_of_the_model(tmp_path: Path) -> None:
    for i, shape in enumerate(SHAPES.values()):
        folder = tiny_checkpoint(tmp_path / str(i), **shape)
        with engine(folder, num_kv_blocks=8) as llm:
            count = num_weights(model_runner(llm).model)
            assert llm.built.models.model_config.num_parameters() == count == reference_model(folder).num_parameters()


# ---- building

CONFIG = replace(TOY, tie_word_embeddings=False, qkv_bias=True, o_bias=True)

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_is_built_in_its_dtype_without_gradients(dtype: torch.dtype) -> None:
    model = build_model(CONFIG, TorchKernels(), TorchAttention(4), dtype, torch.device("cpu"))
    tensors = tensors_of(model)
    wanted = {name: torch.float32 if "norm" in name else dtype for name in tensors}
    assert {name: tensor.dtype for name, tensor in tensors.items()} == wanted
    assert not any(tensor.requires_grad for tensor in tensors.values())
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_weights_are_of_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    reason = unsupported_reason(CPU, dtype)
    if reason is not None:
        pytest.skip(f"no native kernels: {reason}")
    model = build_model(CONFIG, NativeKernels(), TorchAttention(4), dtype, CPU)
    for slot in model.checkpoint_tensors().values():
        slot.copy_(torch.zeros(slot.shape, dtype=dtype))
    embedded = model.embed_tokens(torch.tensor([1]))
    layer = model.layers[0]
    hidden, residual = layer.mlp(layer.mlp_norm, embedded, embedded.clone())
    assert embedded.dtype == hidden.dtype == residual.dtype == dtype
    assert model.lm_head.logits(embedded).dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


class Watcher:
    """In the place of a layer: keeps what comes to it."""

    rotary = None

    def __call__(self, hidden: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen = hidden
        return hidden, hidden.clone()


@pytest.mark.parametrize("architecture", ["GraniteForCausalLM", "Gemma2ForCausalLM"])
def test_the_scale_of_embeddings_is_rounded_only_if_the_family_does(architecture: str) -> None:
    """In bfloat16, which holds neither 6.7 nor the square root of 45: Gemma multiplies by a tensor, Granite by a number."""
    table = {
        "architectures": [architecture],
        "vocab_size": 64,
        "hidden_size": 45,
        "intermediate_size": 8,
        "head_dim": 2,
    }
    table |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    table |= {"max_position_embeddings": 64}
    of_granite = architecture.startswith("Granite")
    config = read_model_config(table | ({"embedding_multiplier": 6.7} if of_granite else {}))
    model = build_model(config, TorchKernels(), TorchAttention(4), torch.bfloat16, CPU)
    weight = torch.randn(64, 45).bfloat16()
    model.embed_tokens.slot().copy_(weight)
    model.layers = [watcher := Watcher()]  # type: ignore[list-item]
    model.norm.slot().copy_(torch.ones(45))
    model.prepare(64)
    model.forward(torch.arange(64), torch.arange(64), [None])  # type: ignore[list-item]
    by_number = weight * (6.7 if of_granite else 45**0.5)
    by_tensor = weight * torch.tensor(6.7 if of_granite else 45**0.5, dtype=torch.bfloat16)
    assert not torch.equal(by_number, by_tensor)
    assert torch.equal(watcher.seen, by_number if of_granite else by_tensor)


def test_a_model_is_built_on_its_device() -> None:
    model = build_model(CONFIG, TorchKernels(), TorchAttention(4), torch.float32, torch.device("meta"))
    assert {tensor.device.type for tensor in tensors_of(model).values()} == {"meta"}


def test_torchs_default_dtype_and_device_count_for_nothing() -> None:
    """A model is of the dtype and on the device that it is built for, to the angles of its rotation."""
    positions = torch.tensor([30_000])
    expected = angles_at(positions, CONFIG.head_dim, 1e6)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = build_model(CONFIG, TorchKernels(), TorchAttention(4), torch.float16, CPU)
            model.prepare(30_001)
    finally:
        torch.set_default_dtype(torch.float32)
    places = tensors_of(model)
    assert {place.device.type for place in places.values()} == {"cpu"}
    wanted = {name: torch.float32 if "norm" in name else torch.float16 for name in places}
    assert {name: place.dtype for name, place in places.items()} == wanted
    [rotary] = model.rotaries
    for angles, right in zip(rotary(positions), expected, strict=True):
        assert torch.equal(angles, right)


def test_a_model_states_what_each_of_its_layers_asks_of_attention() -> None:
    specs = attention_specs(replace(CONFIG, num_layers=3, head_dim=16))
    assert specs == [AttentionSpec(scale=0.25)] * 3
    model = build_model(CONFIG, TorchKernels(), TorchAttention(4), torch.float32, CPU)
    assert [layer.self_attn.attention.spec for layer in model.layers] == attention_specs(CONFIG)
