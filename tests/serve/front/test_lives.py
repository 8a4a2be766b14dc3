"""Drawn lives of a server of several models: every answer is that of its model alone, and nothing is left at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoengine.builder import build_engine, read_config
from nanoengine.serve.front import child as child_module
from nanoengine.serve.front import front as front_module
from nanoengine.serve.front import relay as relay_module
from nanoengine.serve.server.serve import _defaults
from tests.serve.front.fronts import MIB, TOY
from tests.serve.front.lives import OF_REAL, OF_TOYS, TOYS, live
from tests.serve.server.running import Server

OPTIONS = {"device": "cpu", "num_threads": 1, "kv_cache_memory": 100 * MIB}
PROMPTS = ("def binary_search(", "Say yes.")
SMOLLM = Path.home() / ".cache/nanoengine/models/smollm2-135m-instruct.q4_1.gguf"


@pytest.mark.parametrize("seed", range(2))
def test_lives_over_toys(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "COMMAND", TOY)
    monkeypatch.setattr(relay_module, "PING_SECONDS", 0.02)
    monkeypatch.setattr(front_module, "WATCH_SECONDS", 0.3)
    assert live(dict.fromkeys("abc", "toy"), OF_TOYS, TOYS, seed, 12)


def test_a_life_over_real_models(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    third = SMOLLM if SMOLLM.exists() else tiny
    expected: dict[tuple[str, str, str], str] = {}
    for model, names in (("demo", ("one", "two")), (str(third), ("three",))):
        alone = Server(build_engine(read_config(model, _defaults(OPTIONS) | OPTIONS), use_tqdm=False), names[0])
        try:
            for interface in OF_REAL:
                for prompt in PROMPTS:
                    answer = alone.post(interface.path, interface.body(names[0], prompt, stream=False))
                    expected |= {(name, interface.path, prompt): interface.outcome(answer.body) for name in names}
        finally:
            alone.close()
    monkeypatch.setattr(relay_module, "PING_SECONDS", 0.1)
    assert live({"one": "demo", "two": "demo", "three": str(third)}, OF_REAL, expected, 1, 6, OPTIONS)
