"""Async engines around toys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.serve.aio.async_llm_engine import AsyncLLMEngine
from tests.core.toys import make_engine

from .asking import Make
from .toys import StepGate


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes engines around toys, whose invariants are checked after each step."""
    made: list[tuple[AsyncLLMEngine, StepGate]] = []

    def make_one(engine: LLMEngine | None = None, **options: Any) -> tuple[AsyncLLMEngine, StepGate]:
        own = make_engine(**options) if engine is None else engine
        gate = StepGate(own)
        made.append((AsyncLLMEngine(lambda: own), gate))
        return made[-1]

    yield make_one
    for engine, gate in made:
        gate.open()
        engine.close()
