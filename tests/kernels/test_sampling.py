"""Choosing tokens: greedy, temperature, filters and draws, of every row by its own settings, by all kernels."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nanoengine.core.kernels import CoreKernels
from nanoengine.core.messages import NONE_LEFT, UNKNOWN
from nanoengine.core.sampling import draw_tokens
from nanoengine.kernels.native.operations import NativeKernels
from nanoengine.kernels.reference.operations import TorchKernels
from nanoengine.kernels.triton.launch import unsupported_reason
from tests.kernels.draws import key_with_bits, keys_of
from tests.kernels.formulas import DEVICE
from tests.kernels.marks import needs_kernels
from tests.kernels.sampled_rows import (
    GREEDY,
    KINDS,
    VOCAB_SIZES,
    Rows,
    check_tokens,
    random_logits,
    random_params,
)

CPU = torch.device("cpu")


@pytest.fixture(params=["core", "torch", pytest.param("native", marks=needs_kernels), "triton"])
def kernels(request: pytest.FixtureRequest) -> CoreKernels:
    if request.param != "triton":
        return {"core": CoreKernels, "torch": TorchKernels, "native": NativeKernels}[request.param]()
    if (reason := unsupported_reason(DEVICE)) is not None:
        pytest.skip(f"no Triton kernels: {reason}")
    from nanoengine.kernels.triton.operations import TritonKernels

    return TritonKernels()


@pytest.fixture
def device(kernels: CoreKernels) -> torch.device:
    return DEVICE if kernels.name == "triton" else CPU


@pytest.mark.parametrize("kind", [*KINDS, "huge"])
def test_tokens_are_those_of_the_contract(kernels: CoreKernels, device: torch.device, kind: str) -> None:
    sizes = VOCAB_SIZES if kernels.name == "triton" else [*VOCAB_SIZES, 16_384, 40_000]
    for case in range(3 if kernels.name == "triton" else 20):
        rng = random.Random(f"{case} {kind}")
        vocab_size, count = rng.choice(sizes), rng.randint(1, 6)
        rows = Rows([random_params(rng, vocab_size) for _ in range(count)], case, device)
        check_tokens(kernels, rows, random_logits(kind, count, vocab_size, case, device))


FILTERED: list[tuple[dict[str, float], set[int]]] = [
    ({"min_p": 0.3, "top_p": 0.7}, {0}),  # min_p leaves 0.5 and 0.2, and the first has 0.714 of these
    ({"min_p": 0.3, "top_p": 0.72}, {0, 1}),
    ({"min_p": 0.1, "top_k": 3, "top_p": 0.6}, {0}),  # 0.5, 0.2 and 0.1: the first has 0.625
    ({"min_p": 0.1, "top_k": 3, "top_p": 0.64}, {0, 1}),
    ({"min_p": 0.3, "top_k": 3, "top_p": 0.7}, {0}),
    # Roots at temperature 2: 0.707, 0.447, 0.316. min_p leaves two, and the first has 0.613 of these.
    ({"temperature": 2.0, "min_p": 0.5, "top_p": 0.61}, {0}),
    ({"temperature": 2.0, "min_p": 0.5, "top_p": 0.62}, {0, 1}),
]
"""Filters, and the tokens of 0.5, 0.2, 0.1, 0.1 and 0.1 that pass them."""


def test_min_p_comes_before_top_k_and_top_p(kernels: CoreKernels, device: torch.device) -> None:
    """The order of vLLM, vllm/v1/sample/sampler.py: temperature, min_p, top_k, top_p."""
    rows = Rows([filters for filters, _ in FILTERED for _ in range(20)], 0, device)
    logits = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.1]]).log().repeat(20 * len(FILTERED), 1).to(device)
    tokens = rows.choose(kernels, logits)
    assert [set(tokens[i : i + 20]) for i in range(0, len(tokens), 20)] == [expected for _, expected in FILTERED]


@pytest.mark.parametrize("vocab_size", [100, 9000])
def test_logits_that_are_not_finite_are_found_wherever_they_are(
    kernels: CoreKernels, device: torch.device, vocab_size: int
) -> None:
    """However a row is sampled; and the rows beside it get their tokens."""
    hows: list[dict[str, float]] = [GREEDY, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}]
    count = 3 * len(hows) + 1
    rows = Rows([hows[row % len(hows)] for row in range(count)], 1, device)
    logits = random_logits("random", count, vocab_size, 1, device)
    expected = rows.choose(kernels, logits)
    for row in range(1, count):
        logits[row, row * (vocab_size - 1) // (count - 1)] = [torch.nan, torch.inf, -torch.inf][row % 3]
    logits[3], logits[5, 7] = -torch.inf, -torch.inf
    found = rows.choose(kernels, logits)
    wrong = [NONE_LEFT if row == 3 else UNKNOWN for row in range(count) if row % 3 != 2 and row]
    assert [found[row] for row in range(count) if row % 3 != 2 and row] == wrong
    assert found[0] == expected[0]
    assert min(found[2::3]) >= 0


@pytest.mark.parametrize("draw", [draw_tokens, pytest.param("native", marks=needs_kernels)], ids=["torch", "native"])
@pytest.mark.parametrize("bits", [0, (1 << 64) - 1])
def test_the_only_token_that_is_possible_is_drawn_whatever_the_random_bits(
    draw: Callable[[Tensor, Tensor, Tensor], Tensor] | str, bits: int
) -> None:
    logits = torch.full((1, 6), -torch.inf)
    logits[0, 3] = -1e30
    function = NativeKernels().draw_tokens if isinstance(draw, str) else draw
    assert function(logits, keys_of([key_with_bits(bits, 3)]), torch.ones(1)).tolist() == [3]


@needs_kernels
@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 300, 16_383, 16_384, 16_385, 40_000])
def test_every_implementation_for_the_cpu_chooses_the_same(vocab_size: int) -> None:
    """As the protocol has it."""
    rng, logits = random.Random(vocab_size), random_logits("random", 60, vocab_size, 14, CPU)
    params = [random_params(rng, vocab_size) for _ in range(30)] + [{}] * 30
    rows = Rows(params, vocab_size, CPU)
    assert rows.choose(TorchKernels(), logits) == rows.choose(NativeKernels(), logits)
