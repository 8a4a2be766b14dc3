"""What the builder builds, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nanoengine.aio.async_llm_engine import AsyncLLMEngine
from nanoengine.core.llm_engine import LLMEngine

if TYPE_CHECKING:
    from nanoengine.builder import Built


def build_async_engine(build: Callable[[], Built]) -> tuple[AsyncLLMEngine, Built]:
    """An engine, and what it was built of.

    Args:
        build: calls `build_engine`; in the thread that will step, see `AsyncLLMEngine`.

    Raises:
        Whatever `build` raises.
    """
    parts: list[Built] = []

    def make() -> LLMEngine:
        parts.append(build())
        return parts[0].engine

    return AsyncLLMEngine(make), parts[0]
