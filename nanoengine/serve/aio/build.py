"""Builds an engine in the thread that will step it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.serve.aio.async_llm_engine import AsyncLLMEngine

if TYPE_CHECKING:
    from nanoengine.builder import Built


def build_async_engine(build: Callable[[], Built]) -> tuple[AsyncLLMEngine, Built]:
    """An engine, and the parts that it was built of.

    Args:
        build: calls `build_engine`; it runs in the thread of the engine, see `AsyncLLMEngine`.

    Raises:
        Whatever `build` raises.
    """
    parts: list[Built] = []

    def make() -> LLMEngine:
        parts.append(build())
        return parts[0].engine

    return AsyncLLMEngine(make), parts[0]
