"""Kernels of layers with states, as this CPU has them. Other targets: test_targets.py."""

from __future__ import annotations

from nanoengine.kernels.native.operations import NativeKernels
from tests.drawn import check_seeds
from tests.kernels.marks import needs_kernels
from tests.kernels.recurrences import check_recurrences


@needs_kernels
def test_kernels_agree_with_the_reference_and_with_themselves_under_every_cut() -> None:
    kernels = NativeKernels()
    check_seeds(lambda seed: check_recurrences(kernels, seed), range(20))
