"""Gates against their definitions in float64."""

from __future__ import annotations

import pytest
import torch

from nanoengine.kernels.gates import ACTIVATIONS, GATES, gated
from tests.kernels import formulas


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_is_its_definition(activation: str) -> None:
    gate, up = torch.linspace(-12, 12, 241), torch.linspace(9, -9, 241)
    exact = formulas.gated(gate.double(), up.double(), activation)
    torch.testing.assert_close(GATES[activation](gate, up).double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(gated(torch.cat((gate, up)), activation), GATES[activation](gate, up))
