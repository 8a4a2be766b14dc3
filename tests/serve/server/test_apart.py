"""What the requests of one client leave behind is found by that client alone: another learns nothing of it, by time or count."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from nanoengine.core.scheduler import Scheduler
from nanoengine.features.structured.mask_filling import GrammarPolicy
from nanoengine.serve.server.http.app import make_app
from nanoengine.serve.server.served_model import ServedModel
from tests.serve.server.conftest import MakeServer
from tests.serve.server.in_process import post
from tests.serve.server.interfaces import INTERFACES
from tests.serve.server.running import Server

NUM_DRAWN = 12
KEYS = ("one", "two", "three")


def bodies(secret: str) -> dict[str, dict[str, Any]]:
    found = {own.path: own.body([("user", secret)], model="parrot", max_tokens=1) for own in INTERFACES}
    found["/api/chat"]["stream"] = False
    messages = {"messages": [{"role": "user", "content": secret}]}
    return found | {"/v1/messages/count_tokens": messages, "/tokenize": messages}


class Watched:
    """A server, of which is seen what it encodes and what it finds in its prefix cache."""

    def __init__(self, serving: ServedModel, monkeypatch: pytest.MonkeyPatch):
        self.app, self.encoded = make_app(serving), list[str]()
        encode = serving.tokenizer.encode

        def watched(text: str, **kwargs: Any) -> list[int]:
            self.encoded.append(text)
            return encode(text, **kwargs)

        monkeypatch.setattr(serving.tokenizer, "encode", watched)

    def ask(self, client: dict[str, str], path: str, body: Any) -> dict[str, Any]:
        self.encoded.clear()
        status, answer = asyncio.run(post(self.app, path, msgspec.json.encode(body), **client))
        assert status == 200, answer
        found: dict[str, Any] = msgspec.json.decode(answer)
        return found

    def has_encoded(self, secret: str) -> bool:
        return any(secret in text for text in self.encoded)


def cached(answer: dict[str, Any]) -> int | None:
    """Tokens of the prompt that were in the prefix cache, if the interface tells."""
    usage = answer.get("usage", {})
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    found: int | None = usage.get("cache_read_input_tokens", details.get("cached_tokens"))
    return found


def draws(clients: list[dict[str, str]], seed: str) -> Iterator[tuple[dict[str, str], dict[str, str], str, str]]:
    """Two clients, a path, and a text that nobody has sent before."""
    rng = random.Random(seed)
    for number in range(NUM_DRAWN):
        one, other = rng.sample(clients, 2)
        paths = list(bodies(""))
        yield one, other, paths[number % len(paths)], f"secret {number} " + "".join(rng.choices("abc", k=80))


@pytest.mark.parametrize("kind", ["keys", "addresses", "addresses apart"])
def test_no_client_finds_what_another_has_sent(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    by_key = kind == "keys"
    clients = [{"key": key} if by_key else {"address": f"10.0.0.{i}"} for i, key in enumerate(KEYS)]
    server = make_server(api_key=KEYS if by_key else None, separate_addresses=kind == "addresses apart")
    watched = Watched(server.serving, monkeypatch)
    for one, other, path, secret in draws(clients, kind):
        body = bodies(secret)[path]
        watched.ask(one, path, body)
        told = cached(watched.ask(other, path, body))
        assert watched.has_encoded(secret), (path, "another's tokens were at hand")
        if told is not None:
            assert (told < 40) == (kind != "addresses"), (path, told)
        told = cached(watched.ask(one, path, body))
        assert not watched.has_encoded(secret), (path, "its own are remembered")
        assert told is None or told >= 40


def test_a_salt_keeps_the_users_of_one_client_apart(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(make_server().serving, monkeypatch)
    body = {**bodies("a secret of eighty characters and one more")["/v1/chat/completions"], "cache_salt": "one"}
    for salt, is_new in (("one", True), ("one", False), ("two", True), ("two", False)):
        watched.ask({}, "/v1/chat/completions", body | {"cache_salt": salt})
        assert watched.has_encoded("a secret") == is_new


def test_a_grammar_is_compiled_anew_for_another_client(demo: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(demo.serving, monkeypatch)
    body = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": "a secret|another"}}

    def compiled() -> int:
        def count(engine: Any) -> int:
            scheduler: Scheduler = engine.scheduler
            return next(own for own in scheduler.parts if isinstance(own, GrammarPolicy)).grammars.num_compiled

        return int(demo.call(count))

    before = compiled()
    for address, count in (("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.1", 2)):
        watched.ask({"address": address}, "/v1/completions", body)
        assert compiled() == before + count
