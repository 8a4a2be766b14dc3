"""What tests of the async engine ask for, and how they read answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Request
from nanoengine.serve.aio.async_llm_engine import AsyncLLMEngine
from nanoengine.serve.aio.request_stream import Delta, RequestStream

from .toys import StepGate, assert_idle, greedy

LONG = greedy(40)
Make = Callable[..., tuple[AsyncLLMEngine, StepGate]]


def ask(engine: AsyncLLMEngine, *prompt: int, interval: int | None = 1, request_id: str | None = None) -> RequestStream:
    """A long answer."""
    return engine.submit(engine.make_request(list(prompt), LONG, request_id), interval)


async def held(gate: StepGate) -> None:
    await asyncio.to_thread(gate.wait_until_held)


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def read(stream: RequestStream) -> list[Delta]:
    return [delta async for deltas in stream for delta in deltas]


def tokens_of(deltas: list[Delta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


def reasons_of(deltas: list[Delta]) -> list[str]:
    return [delta.finish_reason for delta in deltas if delta.finish_reason is not None]


def nothing(engine: LLMEngine) -> None:
    """A function to call in the engine's thread."""


async def check_idle(engine: AsyncLLMEngine) -> None:
    await engine.call(assert_idle)


class Broken(PolicyPart):
    """It raises, which it must not."""

    def submitted(self, request: Request) -> None:
        if request.client == "bad":
            raise LookupError("no such client")

    def finished(self, seq: Any) -> None:
        if seq.request.client == "worse":
            raise LookupError("broken listener")
