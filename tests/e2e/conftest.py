"""Fixtures for the tests of mistakes and failures."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM
from tests.e2e.small_engine import NEW, PROMPTS, open_llm
from tests.support import reference_greedy, reference_model


@pytest.fixture(scope="session")
def right(tiny: Path) -> list[list[int]]:
    """The greedy continuations of PROMPTS."""
    return reference_greedy(reference_model(tiny), PROMPTS, NEW)


@pytest.fixture
def make(tiny: Path) -> Iterator[Callable[..., LLM]]:
    engines = []

    def make_llm(**options: Any) -> LLM:
        engines.append(open_llm(tiny, **options))
        return engines[-1]

    yield make_llm
    for llm in engines:
        llm.close()


@pytest.fixture
def llm(make: Callable[..., LLM]) -> LLM:
    return make()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as in a terminal, and is handled so again afterwards."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    now = signal.signal(signal.SIGINT, before)
    assert now is signal.default_int_handler
