"""Sparse MLP: a router chooses experts for each token, and their outputs are added with the factors of the router.

Mixtral (Jiang et al., 2024), Qwen3-MoE (Qwen3 technical report, 2025), gpt-oss (OpenAI, 2025), and the router of DeepSeek-V3
(2024), in the numerics and tensor names of transformers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nanoengine.core.kernels import WeightSlot
from nanoengine.core.layers import Linear, RMSNorm
from nanoengine.kernels.operations import ExpertBiases, Mixture
from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.slots import InterleavedColumns, InterleavedExperts, StackedExperts, dense
from nanoengine.models.model_config import ModelConfig

SQUARED = "relu2"
"""The activation of MLPs without a gate: W2 relu(W1 x)^2 (So et al., "Primer", 2021)."""


class Experts:
    """A mixture of experts that replaces an MLP, behind the same norm.

    The router's scores and factors are float32; its logits have the dtype of the model, if probabilities alone choose.

    Args:
        config: with `experts`: their sizes, biases and router.
        factory: makes the weights.
    """

    def __init__(self, config: ModelConfig, factory: Factory):
        facts, hidden_size, activation = config.experts, config.hidden_size, config.activation
        assert facts is not None
        self.kernels, self.facts, self.names = factory.kernels, facts, config.names
        count, width = facts.num_experts, facts.intermediate_size
        self.is_exact = facts.scores != "softmax" or bool(facts.bias_shape)  # whether logits are float32
        # Adapters round their results, so they must not see this matrix.
        of_router = replace(factory, matrices=[]) if self.is_exact else factory
        self.router = Linear(of_router, hidden_size, count, bias=facts.has_biases)
        self.choice_bias = factory.floats(*facts.bias_shape) if facts.bias_shape else None
        size = facts.latent_size or hidden_size
        sizes = ((hidden_size, size), (size, hidden_size)) if facts.latent_size else ()
        self.latent = [Linear(factory, *shape) for shape in sizes]
        up = factory.experts(count, width, size)
        gate = up if activation == SQUARED else factory.experts(count, width, size)  # relu(x) x is relu(x)^2
        down, biases = factory.experts(count, size, width), None
        if facts.has_biases:
            biases = ExpertBiases(*(factory.floats(count, size) for size in (width, width, hidden_size)))
        self.mixture = Mixture(gate, up, down, "relu" if activation == SQUARED else activation, biases)

    def __call__(self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(its output for the norm of the next residual, that residual): [num_tokens, hidden_size] each.

        The argument `residual` may be overwritten.
        """
        x, residual = norm.add_and_norm(hidden, residual)
        return self.routed(x), residual

    def routed(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the sum of the outputs of the chosen experts, of the same shape."""
        chosen, factors = self.route(x)
        if self.facts.scales_inputs:
            x, factors = self.kernels.sigmoid_gate(x, factors), torch.ones_like(factors, dtype=torch.float32)
        if not self.latent:
            return self.kernels.experts(x, self.mixture, chosen, factors)
        into, out = self.latent
        return out(self.kernels.experts(into(x), self.mixture, chosen, factors))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens, hidden_size] -> [num_tokens, num_chosen] experts by descending score, and as many factors; or logits, if
        they multiply inputs.
        """
        facts = self.facts
        if facts.scales_inputs:
            highest, chosen = self.router(x).topk(facts.num_chosen)
            return chosen, highest
        scores = self._scores(x)
        if self.choice_bias is None and facts.num_groups == 1:
            factors, chosen = scores.topk(facts.num_chosen)
        else:
            chosen = self._best_groups(scores if self.choice_bias is None else scores + self.choice_bias)
            chosen = chosen.topk(facts.num_chosen)[1]
            factors = scores.gather(-1, chosen)
        if facts.normalize:
            total = factors.sum(-1, keepdim=True)
            if facts.added_to_sum:
                total = total + facts.added_to_sum
            factors = factors / (total.clamp(min=facts.least_sum) if facts.least_sum else total)
        return chosen, factors if facts.scale == 1.0 else factors * facts.scale

    def _scores(self, x: Tensor) -> Tensor:
        """[num_tokens, num_experts], float32."""
        if not self.is_exact:
            return self.router(x).softmax(-1, dtype=torch.float32)
        logits = self.kernels.logits(x, self.router.weight)
        if self.facts.scores == "softmax":
            return logits.softmax(-1)
        # By the kernel: in torch, the rounding of a sigmoid may depend on the index in its vector.
        return self.kernels.sigmoid_gate(torch.ones_like(logits), logits)

    def _best_groups(self, scores: Tensor) -> Tensor:
        """Scores of experts in the best groups, and -inf for the others."""
        facts = self.facts
        if facts.groups_chosen == facts.num_groups:
            return scores
        groups = scores.unflatten(-1, (facts.num_groups, -1))
        best = groups.topk(2)[0].sum(-1).topk(facts.groups_chosen)[1]
        others = torch.ones(groups.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
        return groups.masked_fill(others[..., None], -torch.inf).flatten(-2)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return self.slots_below(f"{prefix}.{self.names.experts}")

    def slots_below(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> slot: of the router, and of the gate, up and down of each expert, `prefix.experts.i.name`.

        With two names, one tensor has the gates and ups of all experts, interleaved or concatenated, and the other the down
        projections.
        """
        router, names = self.names.router, self.names.expert_gate_up_down
        # The router is never quantized: it is small, and rounding could change the choice of experts.
        slots: dict[str, WeightSlot] = {name: dense(slot) for name, slot in self.router.slots(prefix, router).items()}
        if self.choice_bias is not None:
            slots[f"{prefix}.{router}.e_score_correction_bias"] = self.choice_bias
        for linear, name in zip(self.latent, ("fc1_latent_proj", "fc2_latent_proj"), strict=False):
            slots |= linear.slots(prefix, name)
        (gate, up, down), biases = self.mixture.weights, self.mixture.biases
        paths = [f"{prefix}.experts.{name}" for name in names]
        if self.facts.are_stacked:
            turned = self.facts.are_transposed
            stacked = [StackedExperts(*weights, transposed=turned) for weights in ((gate, up), (down,))]
            return slots | dict(zip(paths, stacked, strict=True))
        if len(names) == 2 and gate is not up:
            slots |= {paths[0]: InterleavedExperts(gate, up), paths[1]: InterleavedExperts(down)}
            if biases is not None:
                slots |= {f"{paths[0]}_bias": InterleavedColumns(biases[:2]), f"{paths[1]}_bias": biases.down}
            return slots
        if biases is not None:
            slots |= {f"{path}_bias": bias for path, bias in zip(paths, biases, strict=True)}
        for name, weights in zip(names, self.mixture.weights[-len(names) :], strict=True):
            for i in range(self.facts.num_experts):
                slots[f"{prefix}.experts.{i}.{name}.weight"] = weights.expert(i)
        return slots


class ExpertsAndShared(Experts):
    """Experts beside an MLP of all tokens, whose output may have a gate (Qwen2-MoE)."""

    def __init__(self, config: ModelConfig, factory: Factory):
        super().__init__(config, factory)
        facts, hidden_size = self.facts, config.hidden_size
        self.is_squared = config.activation == SQUARED
        self.gate_up_proj = Linear(factory, hidden_size, *(facts.shared_size,) * (1 if self.is_squared else 2))
        self.down_proj = Linear(factory, facts.shared_size, hidden_size)
        self.shared_gate = Linear(factory, hidden_size, 1) if facts.shared_is_gated else None

    def __call__(self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x, residual = norm.add_and_norm(hidden, residual)
        routed = self.routed(x)
        activation = None if self.is_squared else self.mixture.activation
        gated, _ = self.kernels.product(x, self.gate_up_proj.weight, activation=activation)
        gated = gated.relu().square_() if self.is_squared else gated
        shared = self.down_proj(gated)
        if self.shared_gate is not None:
            shared = self.kernels.sigmoid_gate(shared, self.shared_gate(x))
        return routed + shared, residual

    def slots_below(self, prefix: str) -> dict[str, WeightSlot]:
        slots = super().slots_below(prefix)
        slots |= self.gate_up_proj.slots(f"{prefix}.shared_expert", *self.names.gate_up)
        slots |= self.down_proj.slots(f"{prefix}.shared_expert", "down_proj")
        return slots if self.shared_gate is None else slots | self.shared_gate.slots(prefix, "shared_expert_gate")
