"""One number: what an operation makes of a row has the same bits beside any other rows, in any number, by one thread or two.

Operations, their shapes and rows are drawn. Right is what each row gets alone, by one thread. Attention has a test of its own
(tests/attention/test_one_number.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoengine.core.sampling import SamplingTable
from nanoengine.kernels.gates import ACTIVATIONS
from nanoengine.kernels.interface import ExpertWeights, Weight
from nanoengine.kernels.native_kernels import NativeKernels
from nanoengine.kernels.native_operations import unsupported_reason
from nanoengine.layers.experts import Experts
from nanoengine.layers.factory import Factory
from nanoengine.models.model_config import ExpertsConfig
from nanoengine.sampling.logprobs import compute_logprobs
from tests.kernels.formulas import DTYPES, weight_of
from tests.kernels.formulas import random as numbers
from tests.kernels.mixtures import experts_of, mixture
from tests.kernels.quantized_matrices import DIFFERENT, FORMATS, Format, drawn, weight_from
from tests.support import threads

REASON = unsupported_reason(torch.device("cpu"), torch.float32)
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")
CPU = torch.device("cpu")

Operation = Callable[[Tensor], tuple[Tensor, ...]]
"""Numbers of some rows -> what is made of each of them."""

EPS = 1e-6


class Drawn:
    """What the operations of one case have in common.

    Attributes:
        x: [rows, inputs].
    """

    def __init__(self, seed: int):
        self.seed, self.rng = seed, random.Random(seed)
        self.dtype = self.rng.choice(DTYPES)
        self.kernels = NativeKernels(exact=self.rng.random() < 0.3)
        self.rows, self.inputs, self.outputs = (
            self.rng.randint(2, 130),
            self.rng.randint(1, 600),
            self.rng.randint(1, 90),
        )
        self.x = self.numbers(self.rows, self.inputs)

    def numbers(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        self.seed += 1
        return numbers(*shape, dtype=dtype or self.dtype, seed=self.seed)

    def weight(self, *outputs: int) -> Weight:
        """Numbers; or each part quantized, of several perhaps not the first; then inputs are a multiple of its unit."""
        if self.rng.random() < 0.4:
            return weight_of(self.kernels, self.numbers(sum(outputs), self.inputs))
        form = self.rng.choice(FORMATS)
        self.inputs = max(form.unit, self.inputs // form.unit * form.unit)
        self.x = self.numbers(self.rows, self.inputs)
        parts = [drawn(form, count, self.inputs, seed=self.seed + i) for i, count in enumerate(outputs)]
        weight = weight_from(self.kernels, *parts, dtype=self.dtype)
        if len(outputs) > 1 and self.rng.random() < 0.3:
            weight.rows(0, outputs[0]).copy_(self.numbers(outputs[0], self.inputs))
        return weight

    def norm(self) -> Tensor:
        return self.numbers(self.inputs, dtype=torch.float32)


def linear(case: Drawn) -> Operation:
    weight = case.weight(case.outputs)
    bias = case.rng.choice([None, case.numbers(case.outputs)])
    return lambda rows: (case.kernels.linear(case.x[rows], weight, bias), case.kernels.logits(case.x[rows], weight))


def gated_linear(case: Drawn) -> Operation:
    weight, activation = case.weight(case.outputs, case.outputs), case.rng.choice(ACTIVATIONS)
    return lambda rows: (case.kernels.gated_linear(case.x[rows], weight, activation),)


def after_norm(case: Drawn) -> Operation:
    weight, norm, activation = case.weight(case.outputs, case.outputs), case.norm(), case.rng.choice(ACTIVATIONS)
    residual = case.rng.choice([None, case.numbers(*case.x.shape)])

    def call(rows: Tensor) -> tuple[Tensor, ...]:
        def added() -> Tensor | None:
            return None if residual is None else residual[rows]

        product = case.kernels.norm_linear(case.x[rows], added(), norm, EPS, weight, None)
        return *product, *case.kernels.norm_gated_linear(case.x[rows], added(), norm, EPS, weight, activation)

    return call


def norm(case: Drawn) -> Operation:
    weight, residual = case.norm(), case.numbers(*case.x.shape)
    return lambda rows: (
        case.kernels.rms_norm(case.x[rows], weight, EPS),
        *case.kernels.add_rms_norm(case.x[rows], residual[rows], weight, EPS),
    )


def gate(case: Drawn) -> Operation:
    both, activation = case.numbers(case.rows, 2 * case.inputs) * 4, case.rng.choice(ACTIVATIONS)
    return lambda rows: (case.kernels.gate(both[rows], activation),)


def embed(case: Drawn) -> Operation:
    weight, ids = case.weight(case.outputs), torch.arange(case.rows) % case.outputs
    return lambda rows: (case.kernels.embed(ids[rows], weight),)


def experts(case: Drawn) -> Operation:
    count = case.rng.randint(1, 9)
    form = case.rng.choice([None, *DIFFERENT])
    inputs, outputs = (case.inputs, case.outputs) if form is None else (256, 256)
    given = mixture(3 * case.rows, count, case.rng.randint(1, count), inputs, outputs, case.dtype)
    weights = [
        experts_of(case.kernels, values) if form is None else quantized_experts(case.kernels, form, count, case.dtype)
        for values in (given.gate, given.up, given.down)
    ]
    return lambda rows: (case.kernels.experts(given.x[rows], *weights, given.chosen[rows], given.factors[rows]),)


def quantized_experts(kernels: NativeKernels, form: Format, count: int, dtype: torch.dtype) -> ExpertWeights:
    weights = kernels.new_experts(count, 256, 256, dtype, CPU)
    for i in range(count):
        weights.expert(i).copy_quantized(drawn(form, 256, 256, seed=i))
    return weights


def router(case: Drawn) -> Operation:
    count = case.rng.randint(1, 300)
    facts = ExpertsConfig(
        num_experts=count, num_chosen=case.rng.randint(1, min(count, 16)), intermediate_size=32, normalize=True
    )
    layer = Experts(Factory(case.kernels, case.dtype, CPU), case.inputs, facts)
    layer.router.weight = weight_of(case.kernels, case.numbers(count, case.inputs))
    return lambda rows: layer.route(case.x[rows])


def sample(case: Drawn) -> Operation:
    vocab = case.rng.choice([40, 3_000, 40_000])
    count = case.rows = min(case.rows, 400_000 // vocab)
    logits, rng = case.numbers(count, vocab, dtype=torch.float32) * 4, case.rng
    table = SamplingTable(
        torch.tensor([rng.choice([0.0, 0.7, 1.5]) for _ in range(count)]),
        torch.tensor([rng.choice([0, 0, 1, 30, 3_000]) for _ in range(count)], dtype=torch.int32),
        torch.tensor([rng.choice([1.0, 1.0, 0.5, 0.95, 0.99999]) for _ in range(count)]),
        torch.tensor([rng.choice([0.0, 0.0, 0.05]) for _ in range(count)]),
        torch.arange(count) * 7919,
    )

    def call(rows: Tensor) -> tuple[Tensor, ...]:
        padded = torch.cat((logits[rows], torch.full((len(rows), rng.randint(0, 50)), -torch.inf)), dim=1)
        chosen = case.kernels.choose_tokens(logits[rows], table, rows.int(), rows + 3)
        return chosen, case.kernels.log_sum_exp(padded)

    return call


def log_probabilities(case: Drawn) -> Operation:
    vocab = case.rng.choice([40, 3_001, 40_000])
    count = case.rows = min(case.rows, 400_000 // vocab)
    logits, own = case.numbers(count, vocab, dtype=torch.float32) * 4, torch.arange(count) * 31 % vocab

    def call(rows: Tensor) -> tuple[Tensor, ...]:
        found = compute_logprobs(lambda part: logits[rows[part]], own[rows], 5)
        return found.own, found.ranks, found.top, found.top_ids

    return call


OPERATIONS: list[Callable[[Drawn], Operation]] = [
    *(linear, gated_linear, after_norm, norm, gate, embed, experts, router, sample, log_probabilities)
]


@pytest.mark.parametrize("make", OPERATIONS, ids=lambda make: make.__name__)
def test_a_row_has_the_same_bits_beside_any_others(make: Callable[[Drawn], Operation]) -> None:
    for seed in range(0, 4000, 100):
        case = Drawn(seed)
        call = make(case)
        with threads(1):
            right = [call(torch.tensor([row])) for row in range(case.rows)]
        for _ in range(6):
            count = case.rng.choice([case.rows, case.rng.randint(1, case.rows), case.rng.randint(1, min(8, case.rows))])
            rows = case.rng.sample(range(case.rows), count)
            with threads(case.rng.choice([1, 2])):
                found = call(torch.tensor(rows))
            for place, results in enumerate(zip(*(right[row] for row in rows), strict=True)):
                assert same(found[place], torch.cat(results)), (seed, place, rows)


def same(found: Any, right: Any) -> bool:
    return torch.equal(found.nan_to_num(7.5), right.nan_to_num(7.5)) and torch.equal(found.isnan(), right.isnan())
