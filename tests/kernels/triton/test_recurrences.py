"""Kernels of layers with states: right to the reference, and the same bits however runs are cut, from slots full of NaN."""

from __future__ import annotations

import pytest
import torch

from nanoengine.kernels.recurrences import Decay, Stores, mamba2
from nanoengine.kernels.triton import recurrence
from nanoengine.kernels.triton.operations import TritonKernels
from tests.kernels.formulas import DEVICE
from tests.kernels.noting import noting
from tests.kernels.recurrences import check_recurrences, runs_of

INTERPRETED = DEVICE.type == "cpu"


@pytest.mark.parametrize("seed", (0, 1, 3) if INTERPRETED else range(60))
def test_kernels_agree_with_the_reference_and_with_themselves_under_every_cut(seed: int) -> None:
    check_recurrences(TritonKernels(), seed, DEVICE.type, small=INTERPRETED)


def test_chunks_longer_than_a_tile_of_the_convolution() -> None:
    """And states that are kept on both sides of its border, and twice behind one token."""
    kernels = TritonKernels()
    with DEVICE:
        x, weight, begun = torch.randn(70, 40), torch.randn(4, 40), torch.randn(9, 3, 40)
        keeps = Stores(
            *(torch.tensor(own, dtype=torch.int32) for own in ([0, 5], [0, 31, 32, 69, 69], [5, 6, 7, 8, 2]))
        )
    states, runs = begun.clone(), runs_of([2], [70])
    runs = type(runs)(*(part.to(DEVICE) for part in runs[:2]))
    whole = kernels.short_conv(x, weight, None, states, runs)
    right = kernels.short_conv(x, weight, None, kept := begun.clone(), runs._replace(stores=keeps))
    assert torch.equal(whole, right)
    assert torch.equal(kept[2], states[2])
    assert torch.equal(kept[8], states[2])
    history = torch.cat((begun[2], x))
    for slot, token in ((5, 0), (6, 31), (7, 32), (2, 69)):
        assert torch.equal(kept[slot], history[token + 1 : token + 4])


def test_steps_that_are_lost_beside_one() -> None:
    """softplus(-12) is 6e-6, and 1 + 6e-6 has few digits of it left."""
    with DEVICE:
        xbc, dt, one = torch.ones(1, 3), torch.full((1, 1), -12.0), torch.ones(1)
        given = xbc, dt, Decay(-one, 0 * one), 0 * one, 1
        runs, (found, right) = runs_of([0], [1]), torch.zeros(2, 1, 1, 1, 1)
        TritonKernels().mamba2(*given, found, runs)
        mamba2(*given, right, runs)
    torch.testing.assert_close(found, right, rtol=1e-6, atol=0)


def test_a_layer_has_one_compiled_kernel_for_all_its_steps() -> None:
    """Whatever is aligned, and wherever states are kept; and nothing is fused in it."""
    states, decay, skip = torch.zeros(9, 2, 16, 8), Decay(torch.ones(2), torch.ones(2)), torch.ones(2)
    stores = Stores(*(torch.zeros(own, dtype=torch.int32) for own in (2, 17, 17)))
    with noting() as launches:
        for width in (82, 96):
            memory = torch.zeros(33, width)
            for first, count, own in ((0, 1, None), (1, 1, None), (0, 32, None), (3, 16, stores), (5, 1, stores)):
                x, a, b = memory[first : first + count, :82].split((80, 1, 1), dim=1)
                runs = runs_of([1], [count])._replace(stores=own)
                recurrence.delta_rule(x, a, b, decay, 2, states, runs)
                recurrence.mamba2(x, a, decay, skip, 2, states, runs)
    assert len({launch.key() for launch in launches}) == 2
    assert not any(launch.options["enable_fp_fusion"] for launch in launches)
