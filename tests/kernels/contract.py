"""The contract of kernels: every operation is its formula; and native ones have one number: what they make of a row has the same
bits beside any other rows, in any number, by one thread or two.

Operations, their shapes and rows are drawn, often at the edges of what kernels cut or pad; weights are numbers, or quantized,
or parts of both; tensors may have gaps. Builds for other CPUs and a sanitizer run the same cases. Attention has a contract of
its own (tests/kernels/attention/contract.py).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanoengine.core.sampling import SamplingTable
from nanoengine.features.sampling.logprobs import compute_logprobs
from nanoengine.kernels.native.operations import NativeKernels
from nanoengine.kernels.operations import Mixture, Norm
from nanoengine.kernels.reference.gates import ACTIVATIONS
from nanoengine.kernels.reference.operations import TorchKernels
from nanoengine.models.layers.experts import Experts
from nanoengine.models.layers.factory import Factory
from nanoengine.models.model_config import ExpertsConfig
from tests.drawn import check_seeds
from tests.kernels.contract_cases import CPU, EPS, Case, Kind, Made, Matrix, Operation
from tests.kernels.formulas import (
    ROUNDING,
    SUMMED,
    assert_drawn,
    assert_gated,
    assert_linear,
    assert_norm,
    gated,
)
from tests.kernels.mixtures import assert_mixture, experts_of, mixture
from tests.kernels.quantized_matrices import (
    DIFFERENT,
    assert_numbers,
    at_its_ends,
    drawn,
    experts_from,
)
from tests.support import TOY, threads


def linear(case: Case) -> Operation:
    matrix = case.matrix(*(case.size(case.kind.most[2]) for _ in range(case.rng.choice([1, 1, 3]))))
    bias = case.maybe(case.numbers(matrix.weight.shape[0]))

    def call(rows: Tensor) -> Made:
        x = case.somehow(case.x[rows])
        return case.kernels.linear(x, matrix.weight, bias), case.kernels.logits(x, matrix.weight)

    def check(out: Tensor, logits: Tensor) -> None:
        assert (out.dtype, logits.dtype) == (case.dtype, torch.float32)
        case.check_product(logits, case.x, matrix)
        if case.kind.is_native:
            assert torch.equal(out, (logits if bias is None else logits + bias.float()).to(case.dtype))
        else:
            case.check_product(out, case.x, matrix, bias)

    return call, check


def halves(case: Case) -> Matrix:
    """Gates and what they are multiplied with: parts of their own, or of other sizes."""
    cut = case.rng.randint(1, 2 * case.outputs - 1)
    return case.matrix(
        *case.rng.choice([(case.outputs, case.outputs), (2 * case.outputs,), (cut, 2 * case.outputs - cut)])
    )


def gated_linear(case: Case) -> Operation:
    matrix, activation = halves(case), case.rng.choice(ACTIVATIONS)

    def check(out: Tensor) -> None:
        assert out.dtype == case.dtype
        if case.rounds and matrix.form:
            halves = case.kernels.logits(case.x, matrix.weight).double().chunk(2, 1)
            tolerance = 1e-5 if case.dtype is torch.float32 else 0.05
            torch.testing.assert_close(out.double(), gated(*halves, activation), rtol=tolerance, atol=tolerance)
        else:
            assert_gated(out, case.x, torch.cat([*map(case.dense, matrix.sources)]), activation, case.looser)

    return lambda rows: case.kernels.product(case.somehow(case.x[rows]), matrix.weight, activation=activation)[
        :1
    ], check


def after_norm(case: Case) -> Operation:
    matrix, activation = halves(case), case.rng.choice(ACTIVATIONS)
    norm, residual = case.numbers(case.inputs, dtype=torch.float32), case.maybe(case.numbers(*case.x.shape))
    bias = case.maybe(case.numbers(2 * case.outputs))

    def call(rows: Tensor) -> Made:
        def added() -> Tensor | None:
            return None if residual is None else residual[rows]

        x = case.x[rows]
        before = Norm(norm, EPS)
        product = case.kernels.product(x, matrix.weight, bias, norm=before, residual=added())
        gates = case.kernels.product(x, matrix.weight, norm=before, residual=added(), activation=activation)
        made = *product, *gates
        assert torch.equal(x.nan_to_num(), case.x[rows].nan_to_num()), (
            "nothing that is given is changed, but a residual"
        )
        return made

    def check(out: Tensor, total: Tensor, gates: Tensor, other_total: Tensor) -> None:
        expected = case.x if residual is None else case.x + residual
        case.check_near(total, expected)
        case.check_near(other_total, expected)
        wide = expected.float()
        is_own = case.kind.is_native and (matrix.form is None) == isinstance(matrix.sources[0], Tensor)
        if is_own and (matrix.form or case.dtype is torch.float32):  # the norm is not rounded on the way
            alone = case.filled(matrix.sources, matrix.form, torch.float32).weight
            factors = case.kernels.rms_norm(wide, norm, EPS)
            assert torch.equal(
                out, case.kernels.linear(factors, alone, None if bias is None else bias.float()).to(case.dtype)
            )
            found, _ = case.kernels.product(factors, alone, activation=activation)
            if case.dtype is torch.float32 or alone.halves_match:  # type: ignore[attr-defined]
                torch.testing.assert_close(gates, found.to(case.dtype), rtol=0, atol=1e-37)  # what is smaller may be 0
            else:  # products are rounded before they are gates
                torch.testing.assert_close(gates.float(), found, rtol=0.05, atol=0.05)
            return
        exact = wide.double()
        factors = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
        blur = case.looser * (1 + 1.1 * ROUNDING[case.dtype] / SUMMED)  # of a norm that is rounded
        for rows, source in matrix.parts():
            if not case.rounds or isinstance(source, Tensor):
                part = None if bias is None else bias[rows]
                assert_linear(out[:, rows], factors, case.dense(source), part, case.looser, blur)
        if not case.rounds or not matrix.form:
            dense = torch.cat([*map(case.dense, matrix.sources)])
            assert_gated(gates, factors, dense, activation, 2 * case.looser, blur)

    return call, check


def norm(case: Case) -> Operation:
    weight, residual, size = (
        case.numbers(case.inputs, dtype=torch.float32),
        case.numbers(*case.x.shape),
        10.0 ** case.rng.randint(-4, 4),
    )
    case.x = (case.x * size).to(case.dtype)
    eps = case.rng.choice([EPS, 1e-2, 1.0])

    def check(out: Tensor, normed: Tensor, total: Tensor) -> None:
        assert_norm(out, case.x, weight, eps, case.looser)
        case.check_near(total, case.x + residual)
        assert_norm(normed, total, weight, eps, case.looser)

    def call(rows: Tensor) -> Made:
        x, before = case.x[rows], residual[rows]
        return case.kernels.rms_norm(case.somehow(x), weight, eps), *case.kernels.add_rms_norm(x, before, weight, eps)

    return call, check


def gate(case: Case) -> Operation:
    both, activation = case.numbers(case.rows, 2 * case.inputs) * 4, case.rng.choice(ACTIVATIONS)
    case.x = both

    def check(out: Tensor) -> None:
        tolerance = case.looser * {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[case.dtype]
        exact = gated(*both.double().chunk(2, 1), activation)
        torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)

    return lambda rows: (case.kernels.gate(both[rows], activation),), check


def embed(case: Case) -> Operation:
    matrix = case.matrix(case.outputs, case.size(case.kind.most[2]))
    ids = torch.randint(0, matrix.weight.shape[0], (case.rows,), device=case.kind.device)

    def check(found: Tensor) -> None:
        assert found.dtype == case.dtype
        for rows, source in matrix.parts():
            here = (ids >= rows.start) & (ids < rows.stop)
            local = ids[here] - rows.start
            if not len(local):
                continue
            if matrix.form and not isinstance(source, Tensor) and case.kind.is_native:
                assert_numbers(found[here], matrix.form, source[local])
            else:
                case.check_near(found[here], case.dense(source)[local])

    return lambda rows: (case.kernels.embed(case.somehow(ids[rows]), matrix.weight),), check


def experts(case: Case) -> Operation:
    activation = case.rng.choice(ACTIVATIONS)
    form = case.rng.choice([None, None, *DIFFERENT]) if case.kind.formats and case.kind.is_native else None
    many = [] if form else [64 if case.kind.is_native else 17]
    count = case.rng.choice([1, 2, 3, 5, 9, *many])
    size, hidden = (256, 256) if form else (case.size(case.kind.most[2]), case.size(case.kind.most[2]))
    rows = case.rows = case.rng.choice([1, case.rows, 3 * case.rows if case.kind.is_native else 97])
    per_row = case.rng.randint(1, min(count, 4))
    given = mixture(rows, count, per_row, hidden, size, case.dtype, case.kind.device.type, activation)
    matrices = [given.gate, given.up, given.down]
    if form:
        sources = [[drawn(form, 256, 256, seed=10 * i + j) for j in range(count)] for i in range(3)]
        weights = [experts_from(case.kernels, values, case.dtype) for values in sources]
        matrices = [torch.stack([one.dequantize(torch.float32) for one in values]) for values in sources]
        given = replace(given, x=given.x / 16)
    else:
        weights = [experts_of(case.kernels, values) for values in matrices]

    case.x = given.x

    def call(rows: Tensor) -> Made:
        x, chosen, factors = (case.somehow(x[rows]) for x in (given.x, given.chosen, given.factors))
        return (case.kernels.experts(x, Mixture(*weights, activation, given.biases), chosen, factors),)

    def check(out: Tensor) -> None:
        if not form:
            assert_mixture(out, given, case.looser)
            return
        exact = replace(given, gate=matrices[0], up=matrices[1], down=matrices[2]).exact()
        tolerance = 0.05 if case.rounds else 2e-6 if case.dtype is torch.float32 else 2.0**-7
        assert (out.double() - exact).norm() <= tolerance * exact.norm()

    return call, check


def extremes(case: Case) -> Operation:
    """No sum saturates: numbers at their ends, -128 among them, times activations at theirs."""
    form, case.inputs = case.rng.choice(case.kind.formats), 256
    source = at_its_ends(form, 20, 256, high=case.rng.random() < 0.5)
    matrix, signs = case.filled([source], None), case.rng.choice([torch.ones(256), torch.arange(256) % 2 * 2.0 - 1])
    x, dense = (case.rng.choice([-127, 127]) * signs).expand(case.rows, -1), case.dense(source).double()

    def check(out: Tensor) -> None:
        allowed = 1e-5 * x.double().abs() @ dense.abs().T
        assert ((out.double() - x.double() @ dense.T).abs() <= allowed).all()

    return lambda rows: (case.kernels.logits(x[rows].to(case.dtype), matrix.weight),), check


def dequantized(case: Case) -> Operation:
    """Products that round nothing to whole numbers are those of the numbers that quantized weights stand for, to the bit."""
    assert isinstance(case.kernels, NativeKernels)
    dtype = getattr(torch, case.kernels.activation_dtype)
    exact = [form for form in case.kind.formats if not form.zeros or form.scales is not torch.float32]
    form = case.rng.choice(exact)  # numbers less their zeros are no float32 in the others
    unit = math.lcm(form.unit, 32)
    case.inputs = max(unit, case.inputs // unit * unit)
    case.x = case.numbers(case.rows, case.inputs).bfloat16().to(case.dtype)
    source = drawn(form, case.outputs, case.inputs)
    matrix = case.filled([source], form)
    numbers = case.filled([source.dequantize(torch.float32).to(dtype)], None, dtype)

    def check(out: Tensor) -> None:
        assert torch.equal(out, case.kernels.logits(case.x.to(dtype), numbers.weight))

    return lambda rows: (case.kernels.logits(case.somehow(case.x[rows]), matrix.weight),), check


def draw(case: Case) -> Operation:
    count = case.rng.choice([1, 2, 15, 16, 17, 1000, 16_383, 16_385, 20_000, 40_000])
    rows = case.rows = min(case.rows, 200_000 // count)
    logits, keys = (
        case.numbers(rows, count, dtype=torch.float32) * case.rng.choice([0, 1, 5]),
        torch.arange(rows) * 7919 + case.seed,
    )
    temperature = torch.tensor([case.rng.choice([0.0, 1.0]) for _ in range(rows)])

    def call(rows: Tensor) -> Made:
        given = (case.somehow(x[rows]) for x in (logits, keys, temperature))
        assert isinstance(case.kernels, NativeKernels)
        return case.kernels.draw_tokens(*given), case.kernels.log_sum_exp(case.somehow(logits[rows]))

    def check(tokens: Tensor, sums: Tensor) -> None:
        greedy = temperature == 0
        assert torch.equal(tokens[greedy], logits[greedy].argmax(-1))
        assert_drawn(tokens[~greedy], logits[~greedy], keys[~greedy])
        torch.testing.assert_close(sums, logits.logsumexp(-1), rtol=1e-6, atol=1e-6)

    return call, check


def choose(case: Case) -> Operation:
    """Nothing is checked but that a row is chosen for by itself: tests/kernels/test_sampling.py says what is right."""
    vocab, rng = case.rng.choice([40, 3_000, 40_000]), case.rng
    count = case.rows = min(case.rows, 400_000 // vocab)
    logits = case.numbers(count, vocab, dtype=torch.float32) * 4
    table = SamplingTable(
        torch.tensor([rng.choice([0.0, 0.7, 1.5]) for _ in range(count)]),
        torch.tensor([rng.choice([0, 0, 1, 30, 3_000]) for _ in range(count)], dtype=torch.int32),
        torch.tensor([rng.choice([1.0, 1.0, 0.5, 0.95, 0.99999]) for _ in range(count)]),
        torch.tensor([rng.choice([0.0, 0.0, 0.05]) for _ in range(count)]),
        torch.arange(count) * 7919,
    )
    return lambda rows: (case.kernels.choose_tokens(logits[rows], table, rows.int(), rows + 3),), lambda _: None


def route(case: Case) -> Operation:
    """Against transformers it is in tests/models/layers/test_experts.py."""
    count = case.rng.randint(1, 300)
    chosen = case.rng.randint(1, min(count, 16))
    facts = ExpertsConfig(num_experts=count, num_chosen=chosen, intermediate_size=32, normalize=True)
    layer = Experts(replace(TOY, hidden_size=case.inputs, experts=facts), Factory(case.kernels, case.dtype, CPU))
    layer.router.weight = case.filled([case.numbers(count, case.inputs)], None).weight
    return lambda rows: layer.route(case.x[rows]), lambda *_: None


def log_probabilities(case: Case) -> Operation:
    """Their values are in tests/features/sampling."""
    vocab = case.rng.choice([40, 3_001, 40_000])
    count = case.rows = min(case.rows, 400_000 // vocab)
    logits, own = case.numbers(count, vocab, dtype=torch.float32) * 4, torch.arange(count) * 31 % vocab

    def call(rows: Tensor) -> Made:
        found = compute_logprobs(lambda part: logits[rows[part]], own[rows], 5)
        return found.logprobs, found.ranks, found.top, found.top_ids

    return call, lambda *_: None


OPERATIONS: list[Callable[[Case], Operation]] = [linear, gated_linear, after_norm, norm, gate, embed, experts]
OF_THE_LIBRARY = [*OPERATIONS, extremes, draw]
OF_NATIVE_KERNELS = [*OF_THE_LIBRARY, choose, route, log_probabilities]


def id_of(make: Callable[[Case], Operation]) -> str:
    return make.__name__


def check_operation(make: Callable[[Case], Operation], kind: Kind, seeds: Sequence[int]) -> None:
    check_seeds(lambda seed: check_case(make, Case(kind, seed)), seeds)


def check_case(make: Callable[[Case], Operation], case: Case) -> None:
    (call, check), device = make(case), case.kind.device
    made = call(torch.arange(case.rows, device=device))
    check(*made)
    if make in OF_THE_LIBRARY:
        assert not any(map(len, call(torch.arange(0, device=device)))), "no rows make no rows"
    if case.kind.is_native:
        check_one_number(case.rng, call, made)
    # torch's own products of bfloat16, on a CPU with AMX, spread what is not finite to another row.
    if type(case.kernels) is not TorchKernels or case.dtype is torch.float32:
        check_spoilt(make, case, call, made)


def check_spoilt(make: Callable[[Case], Operation], case: Case, call: Callable[[Tensor], Made], made: Made) -> None:
    """What is not finite shows in its row, and spoils no other."""
    row, bad = case.rng.randrange(len(case.x)), case.rng.choice([torch.nan, torch.inf, -torch.inf])
    case.x[row, case.rng.randrange(case.x.shape[1])] = bad
    for found, before in zip(call(torch.arange(case.rows, device=case.kind.device)), made, strict=True):
        rest = torch.arange(len(found), device=found.device) != row
        if case.kind.is_native:
            assert torch.equal(found[rest].nan_to_num(7.5), before[rest].nan_to_num(7.5))
        else:
            torch.testing.assert_close(found[rest], before[rest], equal_nan=True)
    if make in (linear, norm) or (make in (gated_linear, after_norm, experts) and bad is torch.nan):
        assert not call(torch.tensor([row], device=case.kind.device))[0].isfinite().all()


def check_one_number(rng: random.Random, call: Callable[[Tensor], Made], made: Made) -> None:
    """Any rows in any order, few of them above all, are made of what they were made of all together."""
    all_rows = len(made[0])
    for most in (1, 1, 5, 5, all_rows, all_rows):
        rows = torch.tensor(rng.sample(range(all_rows), rng.randint(1, min(most, all_rows))))
        with threads(rng.choice([1, 2])):
            found = call(rows)
        for some, every in zip(found, made, strict=True):
            same = torch.equal(some.nan_to_num(7.5), every[rows].nan_to_num(7.5))
            assert same, f"rows {rows.tolist()} are others alone"
            assert torch.equal(some.isnan(), every[rows].isnan()), f"rows {rows.tolist()} are others alone"
