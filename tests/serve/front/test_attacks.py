"""Clients and processes that mean no good: what they cannot do to the server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from nanoengine.errors import InvalidConfig
from nanoengine.serve.front import model as model_module
from nanoengine.serve.server.config import ServerConfig
from nanoengine.serve.server.serve import _socket
from tests.serve.front.fronts import FrontOfToys
from tests.serve.server.running import in_thread, post_bytes, until

MakeFront = Callable[..., FrontOfToys]
TWO = {"a": "toy", "b": "toy"}


def test_quotas_are_of_the_server(make_front: MakeFront) -> None:
    """Models that can be loaded at the same time have no more of them together than one model alone."""
    server = make_front({"a": "toy", "b": "toy", "c": "toy"}, limits={"max_loaded_models": 2}, max_waiting=100)
    config = server.complete("a").json["config"]
    assert (config["max_waiting"], config["max_answer_bytes"]) == (50, 1 << 29)
    assert config["max_waiting_tokens"] == 1 << 23


def test_what_a_page_may_send_unasked_loads_nothing(make_front: MakeFront) -> None:
    server = make_front(TWO)
    for path in ("/v1/completions", "/models/load"):
        answer = server.request("POST", path, {"model": "a", "prompt": "x"}, {"content-type": "text/plain"})
        assert (answer.status, "Unsupported Media Type" in answer.error["message"]) == (400, True)
    assert server.states()["a"] == "not loaded"


def test_a_load_without_an_answer_that_makes_sense_fails(make_front: MakeFront) -> None:
    server = make_front({"odd": "odd", "b": "toy"})
    assert "failed to load: " in server.complete("odd").error["message"]
    assert server.states()["odd"] == "failed"
    assert server.front.model_of("odd").child is None
    assert server.complete("b").status == 200


def test_a_folder_of_sockets_with_a_long_path_is_named() -> None:
    with pytest.raises(InvalidConfig, match="set TMPDIR to a shorter path"):
        _socket(ServerConfig(front_socket="/tmp/" + "x" * 200))


def test_a_log_that_nobody_reads_stops_no_process(make_front: MakeFront, monkeypatch: pytest.MonkeyPatch) -> None:
    def print_nothing(*_: Any, **__: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", print_nothing)
    server = make_front(TWO)
    for _ in range(2):
        connection = server.connect(post_bytes("/v1/completions", {"model": "a", "prompt": "wait"}))
        until(lambda: server.front.jobs and server.states()["a"] == "loaded")
        child = server.front.model_of("a").child
        assert child is not None
        until(lambda child=child: child._last_line == "waits")  # type: ignore[misc]
        connection.close()
        until(lambda child=child: child._last_line == "hung up")  # type: ignore[misc]


def test_a_list_of_many_clients_reads_each_model_once(make_front: MakeFront, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    go_on = threading.Event()

    def read(source: Any) -> None:
        reads.append(source.name)
        go_on.wait(10)
        raise ValueError("no header")

    monkeypatch.setattr(model_module, "read_headers", read)
    server = make_front(TWO)
    lists = [in_thread(server.get, "/api/tags") for _ in range(4)]
    until(lambda: reads)
    go_on.set()
    for one in lists:  # a time that clients can read, although the model cannot be
        rows = one.result().json["models"]
        assert [datetime.fromisoformat(row["modified_at"]).year for row in rows] == [1, 1]
    assert sorted(reads) == ["a", "b"]
