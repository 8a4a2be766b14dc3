"""The decoder in all shapes of Qwen3 against transformers: the logits after every token, not the look of the text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from nanoengine.kernels.reference.attention import TorchAttention
from nanoengine.kernels.reference.operations import TorchKernels
from nanoengine.models.architectures import read_model_config
from nanoengine.models.decoder import build_model
from tests.drawn import FAST
from tests.models.families import engine
from tests.support import TOY, forced_logits, reference_logits, reference_model, tensors_of, tiny_checkpoint

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 250, (75,), generator=torch.Generator().manual_seed(0)).tolist()


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    heads, kv_heads = draw(st.sampled_from([(4, 4), (4, 2), (6, 2), (8, 1), (1, 1), (3, 1)]))
    hidden, intermediate, vocab, layers = draw(
        st.tuples(*map(st.sampled_from, ((48, 20, 37, 100), (80, 53), (300, 257), (1, 2, 3))))
    )
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": hidden}
    shape |= {"intermediate_size": intermediate, "vocab_size": vocab, "num_hidden_layers": layers}
    shape |= {"head_dim": draw(st.sampled_from([16, 32, 64, 6, 10, 96, 256]))}
    shape |= {"attention_bias": draw(st.booleans()), "tie_word_embeddings": draw(st.booleans())}
    return shape | {"rms_norm_eps": draw(st.sampled_from([1e-6, 0.1])), "rope_theta": draw(st.sampled_from([1e4, 1e6]))}


@settings(FAST, max_examples=12)
@given(
    shape=shapes(),
    kernels=st.sampled_from(["auto", "torch"]),
    block_size=st.sampled_from([16, 1, 3, 64, 256]),
    num_prompt=st.integers(40, 75) | st.sampled_from([1, 15, 16, 17, 32]),
    chunk=st.sampled_from([40, 1, 2, 15, 16, 17, 31, 75]),
)
def test_logits_at_every_position_are_those_of_transformers(
    shape: dict[str, Any], kernels: str, block_size: int, num_prompt: int, chunk: int
) -> None:
    """In chunks of any size, and with decodes that begin on either side of a block's border."""
    with TemporaryDirectory() as name:
        folder = tiny_checkpoint(Path(name), seed=num_prompt, **shape)
        model = reference_model(folder)
        right = reference_logits(model, TOKENS)
        assert right.std() > 0.15  # a model whose logits differ, so that 1e-4 means something
        with engine(folder, kernels=kernels, block_size=block_size) as llm:
            logits = forced_logits(llm, TOKENS, num_prompt, chunk)
    torch.testing.assert_close(logits, right, rtol=0, atol=1e-4)


def test_bfloat16_is_not_worse_than_transformers_in_bfloat16(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, num_hidden_layers=3, head_dim=32)
    exact = reference_logits(reference_model(folder), TOKENS)
    with torch.inference_mode():
        half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        theirs = half(torch.tensor([TOKENS])).logits[0]
    with engine(folder, dtype="bfloat16") as llm:
        ours = forced_logits(llm, TOKENS, 40, 40)
    assert ours.dtype == torch.float32
    assert 0 < (ours - exact).square().mean() <= 1.5**2 * (theirs.float() - exact).square().mean()


# ---- building

CONFIG = replace(TOY, tie_word_embeddings=False, qkv_bias=True, o_bias=True)


class Watcher:
    """In the place of a layer: keeps what comes to it."""

    rotary = None

    def __call__(self, hidden: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen = hidden
        return hidden, hidden.clone()


@pytest.mark.parametrize(
    ("architecture", "scale", "options"),
    [("GraniteForCausalLM", 6.7, {"embedding_multiplier": 6.7}), ("Gemma2ForCausalLM", 45**0.5, {})],
)
def test_the_scale_of_embeddings_is_rounded_only_if_the_family_does(
    architecture: str, scale: float, options: dict[str, Any]
) -> None:
    """In bfloat16, which holds neither 6.7 nor the square root of 45: Gemma multiplies by a tensor, Granite by a number."""
    table = {"vocab_size": 64, "hidden_size": 45, "intermediate_size": 8, "head_dim": 2, "max_position_embeddings": 64}
    table |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = build_model(
        read_model_config(table | options | {"architectures": [architecture]}),
        TorchKernels(),
        TorchAttention(4),
        torch.bfloat16,
        CPU,
    )
    weight = torch.randn(64, 45).bfloat16()
    model.embed_tokens.rows(0, 64).copy_(weight)
    model.layers = [watcher := Watcher()]  # type: ignore[list-item]
    model.norm.slot().copy_(torch.ones(45))
    model.prepare(64)
    model.forward(torch.arange(64), torch.arange(64), [None])  # type: ignore[list-item]
    by_number, by_tensor = weight * scale, weight * torch.tensor(scale, dtype=torch.bfloat16)
    assert not torch.equal(by_number, by_tensor)
    assert torch.equal(watcher.seen, by_number if options else by_tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_torchs_default_dtype_counts_for_nothing(dtype: torch.dtype) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = build_model(CONFIG, TorchKernels(), TorchAttention(4), dtype, CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    places = tensors_of(model)
    wanted = {name: torch.float32 if "norm" in name else dtype for name in places}
    assert {name: place.dtype for name, place in places.items()} == wanted
    assert not any(place.requires_grad for place in places.values())
