"""A chat with a model that repeats what it is given, and that can be made to stop in the middle until it is interrupted."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nanoengine.llm
from nanoengine import LLM, SamplingParams
from nanoengine.builder import Built
from nanoengine.core.messages import StepPlan
from nanoengine.serve.chat.answer import AnswerPiece
from tests.serve.server import parrot

HANG = "hang"
"""An answer to a message with this word never ends."""

NUM_STEPS = 20
"""Steps of such an answer that come."""


class Hanging:
    """The executor of a parrot, which stops in the answer to some messages."""

    def __init__(self, executor: Any, word: list[int]):
        self.executor, self.word, self.num_left = executor, word, -1

    def launch(self, plan: StepPlan) -> Any:
        for start in plan.started:
            tokens = start.token_ids
            places = range(len(tokens) - len(self.word) + 1)
            hangs = any(tokens[place : place + len(self.word)] == self.word for place in places)
            self.num_left = NUM_STEPS if hangs else -1
        if self.num_left == 0:
            threading.Event().wait()
        self.num_left -= 1
        return self.executor.launch(plan)

    def close(self) -> None:
        self.executor.close()


def build(folder: Path) -> Built:
    built = parrot.build(folder)
    built.engine.executor = Hanging(built.engine.executor, built.tokenizer.encode(HANG))  # type: ignore[assignment]
    built.engine.default_params = SamplingParams()
    return built


def parrot_llm(folder: Path, monkeypatch: Any) -> LLM:
    """The front door, on an engine without tensors."""
    monkeypatch.setattr(nanoengine.llm, "build_engine", lambda *_: build(folder))
    return LLM("parrot")


def answer(pieces: Iterable[AnswerPiece]) -> str:
    """All that is said, thoughts too."""
    return "".join(piece.text for piece in pieces)
