"""What an answer may take is estimated before it is made: what is sent is never more."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.core.sequence import Request
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.serve.server.admission.answer_bytes import answer_bytes
from tests.serve.server.running import Server

TEXT = "a\u0001\U0001f99c" * 20
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": TEXT, "max_tokens": 200}),
    ("/v1/completions", {"prompt": [TEXT, TEXT], "n": 4, "max_tokens": 150, "echo": True}),
    ("/v1/completions", {"prompt": TEXT, "logprobs": 20, "max_tokens": 120}),
    ("/v1/completions", {"prompt": TEXT, "prompt_logprobs": 20, "n": 3, "max_tokens": 60}),
    ("/v1/completions", {"prompt": TEXT, "return_token_ids": True, "n": 4, "max_tokens": 200}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": TEXT}], "n": 2, "max_tokens": 99}
        | {"logprobs": True, "top_logprobs": 20},
    ),
]

FRAME = 2000
"""Bytes of an answer in which nothing is said: ids, usage, and an entry for each completion."""


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_no_answer_is_longer_than_was_thought(
    parrot: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    sizes, hold = [], parrot.serving.admission.answers.hold

    def noted(client: str, size: int = 0) -> Any:
        sizes.append(size)
        return hold(client, size)

    monkeypatch.setattr(parrot.serving.admission.answers, "hold", noted)
    answer = parrot.post(path, {**body, "ignore_eos": True})
    assert answer.status == 200, answer.body
    assert sizes
    assert len(answer.body) <= sizes[0] + FRAME * len(answer.json["choices"])


def test_what_is_asked_for_is_what_counts() -> None:
    def size(num_prompt: int, max_tokens: int | None, **fields: Any) -> int:
        request = Request("x", None, [1] * num_prompt, SamplingParams(max_tokens=max_tokens, **fields))
        return answer_bytes([request], 1000)

    assert size(10, None) == size(10, 5000) == size(10, 990), "no more than the model has room for"
    assert size(10, 100, n=8) == 8 * size(10, 100)
    assert size(10, 100, logprobs=20) > 20 * size(10, 100, logprobs=0) / 2
    assert size(500, 1, prompt_logprobs=20) > size(500, 1, prompt_logprobs=2) > size(500, 1)
