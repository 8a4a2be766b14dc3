"""What every build of the kernels must get right, in the shapes at which they cut or pad."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch

from nanoengine.core.attention import AttentionSpec
from nanoengine.kernels.gates import ACTIVATIONS
from nanoengine.quantization.tensor import Grouped
from tests.attention.int8_pools import assert_same, both_pools
from tests.attention.paged import PLAIN, Heads, Pool, Sequences, assert_attended, exact_pool
from tests.kernels.builds import Build
from tests.kernels.formulas import (
    DTYPES,
    assert_drawn,
    assert_gated,
    assert_linear,
    assert_norm,
    gated,
    random,
    weight_of,
)
from tests.kernels.mixtures import Mixture, assert_mixture, mixture
from tests.kernels.quantized_matrices import (
    DIFFERENT,
    Format,
    assert_numbers,
    assert_rounded,
    drawn,
    experts_from,
    weight_from,
)

EPS = 1e-6
ROWS = [*range(1, 38), 47, 48, 49, 63, 64, 65, 70, 96, 97, 130]


def check_linear(build: Build, inputs: int, outputs: int = 40, rows: list[int] = ROWS) -> None:
    """With a bias and without, in both dtypes, the logits too."""
    for dtype in DTYPES:
        weight, bias = random(outputs, inputs, dtype=dtype, seed=1), random(outputs, dtype=dtype, seed=2)
        packed = weight_of(build, weight)
        for count in rows:
            x = random(count, inputs, dtype=dtype, seed=count)
            assert_linear(build.linear(x, packed, bias), x, weight, bias)
            assert_linear(build.logits(x, packed), x, weight, None)


def check_batches(build: Build, inputs: int) -> None:
    """A row is the same in batches of every size."""
    for dtype in DTYPES:
        weight, x = weight_of(build, random(40, inputs, dtype=dtype, seed=1)), random(70, inputs, dtype=dtype)
        together = build.linear(x, weight, None)
        for count in range(1, 70):
            assert torch.equal(build.linear(x[:count], weight, None), together[:count])


def check_embed(build: Build) -> None:
    for dtype in DTYPES:
        for inputs in (1, 16, 33):
            weight, ids = random(70, inputs, dtype=dtype), torch.tensor([0, 69, 31, 32, 33, 31] * 4)
            assert torch.equal(build.embed(ids, weight_of(build, weight)), weight[ids])


def check_norm(build: Build) -> None:
    for dtype in DTYPES:
        for size in (1, 15, 16, 17, 50, 128):
            x, weight = random(6, size, dtype=dtype), random(size, dtype=torch.float32, seed=1)
            assert_norm(build.rms_norm(x, weight, EPS), x, weight, EPS)
            residual = random(6, size, dtype=dtype, seed=2)
            total = x + residual
            assert_norm(build.add_rms_norm(x, residual, weight, EPS)[0], total, weight, EPS)
            assert torch.equal(residual, total)


def check_gated(build: Build) -> None:
    for dtype in DTYPES:
        for inputs, size in ((1, 32), (33, 64), (64, 96)):
            weight = random(2 * size, inputs, dtype=dtype, seed=1)
            packed = weight_of(build, weight)
            for rows in (1, 2, 13, 33, 97):
                x = random(rows, inputs, dtype=dtype, seed=rows)
                for activation in ACTIVATIONS:
                    assert_gated(build.gated_linear(x, packed, activation), x, weight, activation)
        gates = torch.cat((torch.linspace(-120, 120, 1018), torch.logspace(-30, 30, 99), -torch.logspace(-30, 30, 99)))
        weight = torch.cat((gates.to(dtype), random(len(gates), dtype=dtype)))[:, None]
        for activation in ACTIVATIONS:
            result = build.gated_linear(torch.ones(1, 1, dtype=dtype), weight_of(build, weight), activation)
            assert_gated(result, torch.ones(1, 1), weight, activation)


def check_experts(build: Build) -> None:
    for dtype in DTYPES:
        for rows, experts, per_row, hidden, size in (
            (1, 9, 9, 33, 17),
            (2, 3, 2, 64, 96),
            (97, 1, 1, 32, 33),
            (300, 4, 2, 31, 64),
        ):
            for activation in ACTIVATIONS:
                given = mixture(rows, experts, per_row, hidden, size, dtype, activation=activation)
                assert_mixture(given.by(build), given)


def check_quantized(build: Build, formats: Sequence[Format] = DIFFERENT) -> None:
    """Exact and rounded products, numbers and gates; whole rows as a group may be of any length."""
    rounding, exact = build.in_both_ways()
    for dtype, form in product(DTYPES, formats):
        for outputs, inputs in ((33, 512), (16, 256), (40, 256 if form.group or not form.bits else 75)):
            source = drawn(form, outputs, inputs)
            rounds, floats = (weight_from(kernels, source, dtype=dtype) for kernels in (rounding, exact))
            ids, dense = torch.tensor([outputs - 1, 0, 7, 0, 15]), source.dequantize(torch.float32)
            assert_numbers(build.embed(ids, rounds), form, source[ids])
            together = rounding.logits(random(97, inputs, dtype=dtype), rounds)
            for rows in (1, 2, 3, 4, 5, 6, 13, 97):
                x = random(97, inputs, dtype=dtype)[:rows]
                assert_linear(exact.logits(x, floats), x, dense, None)
                result = rounding.logits(x, rounds)
                assert_rounded(result, x, source)
                assert torch.equal(result, together[:rows])
        source, x = drawn(form, 64, 256), random(7, 256, dtype=dtype) / 16
        rounds, floats = (weight_from(kernels, source, dtype=dtype) for kernels in (rounding, exact))
        assert_gated(exact.gated_linear(x, floats), x, source.dequantize(torch.float32))
        gates_and_ups = rounding.logits(x, rounds).double().chunk(2, 1)
        tolerance = 1e-5 if dtype is torch.float32 else 2.0**-7
        found = rounding.gated_linear(x, rounds).double()
        torch.testing.assert_close(found, gated(*gates_and_ups), rtol=tolerance, atol=tolerance)


def check_mixed(build: Build) -> None:
    """Parts of numbers beside quantized ones: each is what it is alone."""
    for kernels, dtype in product(build.in_both_ways(), DTYPES):
        parts = drawn(DIFFERENT[5], 33, 256), random(20, 256, dtype=dtype), drawn(DIFFERENT[8], 40, 256)
        weight = kernels.new_weight(93, 256, dtype, torch.device("cpu"))
        weight.rows(0, 33).copy_quantized(parts[0])
        weight.rows(33, 20).copy_(parts[1])
        weight.rows(53, 40).copy_quantized(parts[2])
        alone = [weight_from(kernels, parts[0], dtype=dtype), weight_of(kernels, parts[1])]
        alone.append(weight_from(kernels, parts[2], dtype=dtype))
        for rows in (1, 5, 97):
            x = random(rows, 256, dtype=dtype, seed=rows)
            expected = torch.cat([kernels.linear(x, one, None) for one in alone], 1)
            assert torch.equal(kernels.linear(x, weight, None), expected)


def check_extremes(build: Build) -> None:
    """No sum saturates: numbers at their ends, -128 among them, times activations at theirs."""
    for number in (-128, 127):
        numbers = torch.full((16, 256), number + 128, dtype=torch.uint8)
        weights = Grouped(numbers, torch.ones(16, 1), None, 8), Grouped(numbers // 255 * 15, torch.ones(16, 1), None, 4)
        for source, sign, kernels in product(weights, (-127.0, 127.0), build.in_both_ways()):
            x = torch.full((3, 256), sign)
            expected = x @ source.dequantize(torch.float32).T
            torch.testing.assert_close(kernels.logits(x, weight_from(kernels, source)), expected, rtol=1e-5, atol=0)


def check_quantized_experts(build: Build, formats: Sequence[Format] = DIFFERENT) -> None:
    """Rounded ones are near; they are as far off as their activations were rounded."""
    rounding, exact = build.in_both_ways()
    for dtype, form in product(DTYPES, formats):
        given = mixture(19, 3, 3, 256, 256, dtype)
        sources = [[drawn(form, 256, 256, seed=10 * i + j) for j in range(3)] for i in range(3)]
        dense = [torch.stack([one.dequantize(torch.float32) for one in values]) for values in sources]
        scaled = Mixture(given.x / 16, *dense, given.chosen, given.factors)
        expected = scaled.exact()
        for kernels, tolerance in ((exact, 2e-6 if dtype is torch.float32 else 2.0**-7), (rounding, 0.05)):
            weights = [experts_from(kernels, values, dtype) for values in sources]
            error = kernels.experts(scaled.x, *weights, given.chosen, given.factors).double() - expected
            assert error.norm() <= tolerance * expected.norm()


def check_draws(build: Build) -> None:
    for count in (1, 15, 16, 17, 1000, 20_000):
        logits, keys = random(6, count, dtype=torch.float32), (random(6, dtype=torch.float64) * 2**62).long()
        assert_drawn(build.draw_tokens(logits, keys, torch.ones(6)), logits, keys)
        assert torch.equal(build.draw_tokens(logits, keys, torch.zeros(6)), logits.argmax(-1))
        torch.testing.assert_close(build.log_sum_exp(logits), logits.logsumexp(-1), rtol=1e-6, atol=1e-6)


HEADS = [Heads(2, 1, 32), Heads(1, 2, 96), Heads(2, 3, 64), Heads(1, 5, 128), Heads(1, 8, 256), Heads(1, 35, 32)]


SPECS = [
    AttentionSpec(1.0, window=45, sinks=True, soft_cap=3.0),
    AttentionSpec(1.0, window=530, soft_cap=50.0),
    AttentionSpec(1.0, window=17, sinks=True),
]
"""With those heads that are asked for windows, sinks and soft caps."""
HEADS_OF_SPECS = [Heads(1, 4, 256), Heads(2, 3, 64)]


def check_prefill(build: Build, some_heads: list[Heads] = HEADS) -> None:
    """Whole prompts, then further chunks."""
    for dtype in DTYPES:
        for heads, spec in [*((heads, PLAIN) for heads in some_heads), *product(HEADS_OF_SPECS, SPECS)]:
            sequences = Sequences(heads, 32, [1, 17, 33, 290], dtype)
            native, exact = Pool(sequences, build.attention(32), spec=spec), exact_pool(sequences, spec=spec)
            for starts, ends in (([0, 0, 0, 0], [1, 15, 32, 250]), ([0, 15, 32, 250], [1, 17, 33, 290])):
                results = [pool.prefill(starts, ends) for pool in (native, exact)]
                assert_attended(*results, starts, ends, spec)


def check_decode(build: Build) -> None:
    for dtype in DTYPES:
        for heads, spec in [*((heads, PLAIN) for heads in HEADS), *product(HEADS_OF_SPECS, SPECS)]:
            sequences = Sequences(heads, 16, [1, 2, 17, 64, 65, 1080], dtype)
            pools = Pool(sequences, build.attention(16), spec=spec), exact_pool(sequences, spec=spec)
            for pool in pools:
                pool.fill()
            lens = sequences.lens
            for starts in ([0, 0, 13, 63, 55, 1070], [n - 1 for n in lens]):  # a few tokens of each, then one
                assert_attended(*(pool.mixed(len(lens), starts, lens) for pool in pools), starts, lens, spec)


def check_int8(build: Build) -> None:
    """The same bits as of a cache that is not quantized, and holds what comes out of one that is."""
    for dtype in DTYPES:
        for heads in HEADS[:4]:
            sequences = Sequences(heads, 16, [1, 17, 33, 290], dtype)
            pools = both_pools(build.attention(16), sequences)
            for starts, ends in (([0, 0, 0, 0], [1, 15, 31, 250]), ([0, 15, 31, 250], [1, 17, 33, 290])):
                assert_same(*(pool.prefill(starts, ends) for pool in pools))
            assert_same(*(pool.mixed(4, [0, 14, 32, 280], [1, 17, 33, 290]) for pool in pools))
