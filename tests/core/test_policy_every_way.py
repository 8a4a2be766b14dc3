"""The theorem of the policy: what a request gets does not depend on how it is scheduled."""

from __future__ import annotations

import pytest

from .lives import Plug, check_lives


@pytest.mark.parametrize("seed", range(6))
def test_what_a_request_gets_does_not_depend_on_the_way_in_which_it_is_scheduled(seed: int) -> None:
    check_lives(Plug(seed), 40)
