"""The sparse MLP against that of transformers, where a rounding or a tie decides; else see tests/models/test_architectures.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from nanoengine.models.layers.experts import Experts
from nanoengine.models.layers.factory import Factory
from nanoengine.models.model_config import ExpertsConfig, TensorNames
from tests.support import TOY

HIDDEN, SIZE = 33, 20
NAMES = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}


def block_of_transformers(kind: str, experts: int, chosen: int) -> Any:
    """With random weights in float32."""
    torch.manual_seed(experts + chosen)
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": chosen, "experts_implementation": "eager"}
    block: Any
    if kind == "mixtral":
        block = MixtralSparseMoeBlock(MixtralConfig(**sizes, num_local_experts=experts, intermediate_size=SIZE))
    else:
        options = {"num_experts": experts, "moe_intermediate_size": SIZE, "norm_topk_prob": True}
        block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes, **options))
    for parameter in block.parameters():
        parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    block.gate.weight.data *= 3
    return block.requires_grad_(False)


def layer_of(factory: Factory, block: Any, names: tuple[str, str, str]) -> Experts:
    """A layer with the weights of a block, by the names of a checkpoint."""
    experts, hidden = block.gate.weight.shape
    facts = ExpertsConfig(num_experts=experts, num_chosen=block.gate.top_k, intermediate_size=SIZE, normalize=True)
    layer = Experts(
        replace(TOY, hidden_size=hidden, experts=facts, names=TensorNames(expert_gate_up_down=names)), factory
    )
    tensors = {"mlp.gate.weight": block.gate.weight}
    for i in range(experts):
        gate, up = block.experts.gate_up_proj[i].chunk(2)
        for name, values in zip(names, (gate, up, block.experts.down_proj[i]), strict=True):
            tensors[f"mlp.experts.{i}.{name}.weight"] = values
    places = layer.slots_below("mlp")
    assert places.keys() == tensors.keys()
    for name, place in places.items():
        assert place.shape == tensors[name].shape
        place.copy_(tensors[name])
    return layer


@pytest.mark.parametrize("kind", NAMES)
def test_bfloat16_is_as_near_as_transformers_in_bfloat16(factory: Factory, kind: str) -> None:
    """Both round the router's logits before they choose: where these differ by more than that, both choose the same."""
    factory = Factory(factory.kernels, torch.bfloat16, factory.device)
    block = block_of_transformers(kind, 6, 2).bfloat16()
    layer = layer_of(factory, block, NAMES[kind])
    x = torch.randn(100, HIDDEN).bfloat16()
    likeliest = block.gate(x)[0].float().sort(descending=True).values[:, :3]
    x = x[likeliest.diff().amax(1) < -0.1]
    assert len(x) > 20
    chosen, factors = layer.route(x)
    _, expected_factors, expected = block.gate(x)
    assert torch.equal(chosen, expected)
    assert factors.dtype == torch.float32
    torch.testing.assert_close(factors, expected_factors.float(), rtol=2**-5, atol=0)
    out = factory.kernels.experts(x, layer.mixture, chosen, factors)
    torch.testing.assert_close(out, block(x[None])[0], rtol=2**-5, atol=2**-5)


def test_of_equals_it_chooses_those_that_transformers_does(factory: Factory) -> None:
    block = block_of_transformers("mixtral", 8, 3)
    block.gate.weight.data = torch.randint(-1, 2, (8, HIDDEN)).float()  # sums of whole numbers are exact in any order
    layer = layer_of(factory, block, NAMES["mixtral"])
    x = torch.randint(-1, 2, (60, HIDDEN)).float()
    x[0] = 0.0  # all are equal
    logits, _, expected = block.gate(x)
    least = logits.gather(1, expected).amin(1, keepdim=True)
    assert ((logits >= least).sum(1) > 3).sum() > 5, "there are ties between those that are chosen and others"
    assert torch.equal(layer.route(x)[0], expected)
