"""Drawn lives of a server of several models: every answer is that of its model alone, and nothing is left at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoengine.models.fetch import DOWNLOADS
from nanoengine.serve.front import child as child_module
from nanoengine.serve.front import front as front_module
from nanoengine.serve.front import relay as relay_module
from tests.serve.front.fronts import TOY
from tests.serve.front.interfaces import OF_REAL, OF_TOYS
from tests.serve.front.lives import OPTIONS, TOYS, live, outcomes_alone


@pytest.mark.parametrize("seed", range(2))
def test_lives_over_toys(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "COMMAND", TOY)
    monkeypatch.setattr(relay_module, "PING_SECONDS", 0.02)
    monkeypatch.setattr(front_module, "WATCH_SECONDS", 0.3)
    assert live(dict.fromkeys("abc", "toy"), OF_TOYS, TOYS, seed, 12)


def test_a_life_over_real_models(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = DOWNLOADS["smollm2"].path
    models = {"one": "demo", "two": "demo", "three": str(fetched if fetched.exists() else tiny)}
    expected = outcomes_alone(models)
    monkeypatch.setattr(relay_module, "PING_SECONDS", 0.1)
    assert live(models, OF_REAL, expected, 1, 4, OPTIONS)
