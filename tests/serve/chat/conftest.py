"""A chat without tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.serve.chat.session import Session
from tests.serve.chat.toys import parrot_llm
from tests.serve.server.parrot import save_tokenizer

NewLLM = Callable[..., LLM]


@pytest.fixture
def new_llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewLLM]:
    """A parrot, with a chat template if one is given."""
    made: list[LLM] = []

    def new(*template: str) -> LLM:
        made.append(parrot_llm(save_tokenizer(tmp_path / f"parrot-{len(made)}", *template), monkeypatch))
        return made[-1]

    yield new
    for llm in made:
        llm.close()


@pytest.fixture
def session(new_llm: NewLLM) -> Session:
    """A conversation with it."""
    return Session(new_llm(), SamplingParams(temperature=0, max_tokens=None))
