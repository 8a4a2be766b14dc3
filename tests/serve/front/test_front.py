"""A whole front over toy processes: what clients get."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from nanoengine.serve.front import front as front_module
from nanoengine.serve.front import relay as relay_module
from nanoengine.serve.front.memory_plan import PROCESS_BYTES
from tests.serve.front.fronts import MIB, FrontOfToys
from tests.serve.server.running import body_of, in_thread, post_bytes, read_all, until

MakeFront = Callable[..., FrontOfToys]
TWO = {"a": "toy", "b": "toy"}


def test_a_request_is_answered_by_the_model_that_it_names(make_front: MakeFront) -> None:
    server = make_front(TWO)
    assert server.states() == {"a": "not loaded", "b": "not loaded"}
    for name in "ab":
        answer = server.complete(name, "hello")
        assert (answer.status, answer.json["model"], answer.json["prompt"]) == (200, name, "hello")
        assert answer.json["options"] == {"kv_cache_memory": 100 * MIB}
        assert len(answer.headers["x-request-id"]) == 32
        streamed = server.complete(name, "one two three", stream=True)
        assert streamed.headers["content-type"] == "text/event-stream"
        assert streamed.body == b"data: one\n\ndata: two\n\ndata: three\n\n"
    assert server.states() == {"a": "loaded", "b": "loaded"}
    until(lambda: not server.front.jobs)


def test_an_unknown_name_or_none_is_an_error_of_the_client(make_front: MakeFront) -> None:
    server = make_front({"coder": "toy", "b": "toy"})
    answer = server.complete("codr")
    assert (answer.status, answer.error["param"]) == (404, "model")
    assert "did you mean 'coder'" in answer.error["message"]
    assert server.front.model_of("coder:latest").name == "coder"
    for body in ({"prompt": "x"}, {"model": None}, {"model": 5}, {"model": ["coder"]}):
        assert server.post("/v1/completions", body).status == 400
    assert server.post("/v1/completions", b"{").status == 400
    assert server.states() == {"coder": "not loaded", "b": "not loaded"}


def test_clients_are_checked_by_the_front_and_known_to_the_model(make_front: MakeFront) -> None:
    server = make_front(TWO, api_key=("first", "second"))
    assert server.complete("a").status == 401
    forged = {"authorization": "Bearer second", "x-nanoengine-client": "admin"}
    answer = server.request("POST", "/v1/completions", {"model": "a", "prompt": "x"}, forged)
    assert (answer.json["client"], answer.json["secret"]) == ("key-1", None)
    folder = server.front._folder.name
    assert os.stat(folder).st_mode & 0o777 == 0o700


def test_a_body_has_the_limit_of_the_server(make_front: MakeFront) -> None:
    server = make_front(TWO, max_body_bytes=1000, max_held_body_bytes=4000)
    assert server.complete("a", "x" * 1000).status == 413
    assert server.states()["a"] == "not loaded"


def test_a_client_that_hangs_up_ends_its_request_in_the_process(
    make_front: MakeFront, capfd: pytest.CaptureFixture[str]
) -> None:
    server = make_front(TWO)
    for stream in (False, True):
        connection = server.connect(post_bytes("/v1/completions", {"model": "a", "prompt": "wait", "stream": stream}))
        until(lambda: len(server.front.jobs) == 1 and server.states()["a"] == "loaded")
        lines = ""

        def heard(word: str) -> bool:
            nonlocal lines
            lines += capfd.readouterr().err
            return word in lines

        until(lambda: heard("a: waits"))
        connection.close()
        until(lambda: heard("a: hung up"))
        until(lambda: not server.front.jobs)


def test_a_process_that_dies_ends_its_streams_alone(make_front: MakeFront, caplog: pytest.LogCaptureFixture) -> None:
    server = make_front(TWO)
    server.complete("b")
    waiting = in_thread(server.complete, "b", "one two", stream=True)
    answer = server.complete("a", "one cut two", stream=True)
    assert answer.body.startswith(b"data: one\n\n")
    assert answer.body.endswith(b"data: [DONE]\n\n")
    error = json.loads(answer.body.split(b"data: ")[2])["error"]
    assert (error["code"], "SIGKILL" in error["message"]) == (503, True)
    assert waiting.result().body == b"data: one\n\ndata: two\n\n"
    until(lambda: server.states()["a"] == "not loaded")
    assert "a: its process was ended by SIGKILL; the next request loads it again" in caplog.text
    assert server.complete("a").status == 200


def test_streams_that_wait_for_a_load_get_pings_of_their_interface(
    make_front: MakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "PING_SECONDS", 0.02)
    server = make_front({"slow": "hangs"}, limits={"load_timeout": 0.5})
    for path, ping, end in (
        ("/v1/chat/completions", b": ping\n\n", b"data: [DONE]\n\n"),
        ("/v1/messages", b'event: ping\ndata: {"type":"ping"}\n\n', b'load_timeout); it is tried again in 1 s"}}\n\n'),
        ("/api/chat", b" ", b"\n"),
        ("/v1/responses", b": ping\n\n", b"\n\n"),
    ):
        answer = server.post(path, {"model": "slow", "stream": True, "prompt": "x"})
        assert answer.status == 200, answer
        assert answer.body.startswith(2 * ping)
        assert answer.body.endswith(end)
        assert b"load_timeout" in answer.body
        server.front.model_of("slow").retry_at = server.front.model_of("slow").num_failures = 0
    late = server.complete("slow", "x")
    assert (late.status, "load_timeout" in late.error["message"]) == (503, True)
    server = make_front({"broken": "fails", "a": "toy", "b": "toy"})  # starts of processes take long on a busy machine
    broken = server.complete("broken")
    assert broken.status == 503
    assert "failed to load: its weights are broken" in broken.error["message"]
    assert int(broken.headers["retry-after"]) >= 1
    bad = server.complete("a", "bad", stream=True)  # its load takes longer than a ping
    assert bad.status == 200
    assert b'{"error":{"message":"prompt is bad","param":"prompt"}}' in bad.body
    odd = server.complete("b", "odd", "/v1/responses", stream=True)
    assert (odd.status, b'"message":"status 500"' in odd.body) == (200, True)


def test_what_does_not_fit_is_refused_with_who_holds_what(make_front: MakeFront) -> None:
    server = make_front(TWO, available=PROCESS_BYTES + 150 * MIB)
    server.complete("a")
    connection = server.connect(post_bytes("/v1/completions", {"model": "a", "prompt": "wait"}))
    until(lambda: len(server.front.jobs) == 1)
    refused = server.complete("b")
    assert refused.status == 503
    assert "a has 484 MiB (1 requests)" in refused.error["message"]
    assert refused.headers["retry-after"] == "1"
    connection.close()
    until(lambda: not server.front.jobs)
    assert server.complete("b").status == 200
    assert server.states() == {"a": "not loaded", "b": "loaded"}


def test_models_are_loaded_and_unloaded_as_llamacpps_router_does(make_front: MakeFront) -> None:
    server = make_front(TWO)
    assert server.post("/models/load", {"model": "a"}).json == {"success": True}
    assert server.states() == {"a": "loaded", "b": "not loaded"}
    rows = {row["id"]: row["status"]["value"] for row in server.get("/models").json["data"]}
    assert rows == {"a": "loaded", "b": "unloaded"}
    connection = server.connect(post_bytes("/v1/completions", {"model": "a", "prompt": "wait"}))
    until(lambda: len(server.front.jobs) == 1)
    assert server.post("/models/unload", {"model": "a"}).status == 503
    connection.close()
    until(lambda: not server.front.jobs)
    assert server.post("/models/unload", {"model": "a"}).json == {"success": True}
    assert server.states() == {"a": "not loaded", "b": "not loaded"}


def test_ollamas_keep_alive_says_when_a_model_goes(make_front: MakeFront) -> None:
    server = make_front(TWO)
    empty = server.post("/api/generate", {"model": "a", "prompt": "", "keep_alive": 0})
    assert (empty.json["done_reason"], server.states()["a"]) == ("unload", "not loaded")
    server.post("/api/generate", {"model": "a", "prompt": "x", "keep_alive": "1h", "stream": False})
    [row] = server.get("/api/ps").json["models"]
    assert (row["name"], row["status"]["state"]) == ("a", "loaded")
    server.post("/api/generate", {"model": "a", "prompt": "x", "keep_alive": 0, "stream": False})
    until(lambda: server.states()["a"] == "not loaded")
    assert server.get("/api/ps").json == {"models": []}
    assert server.complete("a", keep_alive="soon").error["param"] == "keep_alive"


def test_pinned_models_are_loaded_at_the_start(make_front: MakeFront) -> None:
    server = make_front(TWO, limits={"pin": ("b",), "keep_alive": "0"})
    until(lambda: server.states() == {"a": "not loaded", "b": "loaded"})
    server.complete("b")
    server.complete("a")
    until(lambda: server.states() == {"a": "not loaded", "b": "loaded"})


def test_health_is_of_the_server_or_of_a_model(make_front: MakeFront) -> None:
    server = make_front(TWO)
    assert server.get("/health").status == 200
    assert server.get("/health?model=a").json == {"status": "the model a is not loaded"}
    server.complete("a")
    assert server.get("/health?model=a").status == 200
    assert server.get("/health?model=c").status == 404
    until(lambda: server.get("/load").json == {"server_load": 0})


def test_a_process_whose_server_does_not_answer_is_ended(
    make_front: MakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WATCH_SECONDS", 0.02), ("ANSWER_SECONDS", 0.1)):
        monkeypatch.setattr(front_module, name, value)
    server = make_front(TWO)
    server.complete("a")
    child = server.front.model_of("a").child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: server.states()["a"] == "not loaded")
    assert server.complete("a").status == 200


def test_metrics_of_all_models_have_their_label(make_front: MakeFront) -> None:
    server = make_front(TWO)
    server.complete("a")
    server.complete("b")
    lines = server.get("/metrics").body.decode().splitlines()
    start = lines.index("# TYPE tokens counter")
    assert lines[start + 1] == 'tokens{model="a",engine="0"} 1'
    assert 'tokens{model="b",engine="0"} 1' in lines
    assert lines.count("# TYPE tokens counter") == 1
    assert 'up{model="b"} 1' in lines
    assert 'nanoengine:model_state{model="a",state="loaded"} 1' in lines
    assert any(line.startswith("nanoengine_front_process_resident_memory_bytes ") for line in lines)


def test_what_concerns_a_loaded_model_loads_none(make_front: MakeFront) -> None:
    server = make_front(TWO)
    assert server.post("/reset_prefix_cache?model=a", {}).status == 503
    assert server.post("/reset_prefix_cache", {}).status == 400
    assert server.states()["a"] == "not loaded"
    server.complete("a")
    assert server.post("/reset_prefix_cache?model=a", {}).status == 200


def test_an_adapter_has_its_name_when_its_load_is_answered(make_front: MakeFront) -> None:
    server = make_front(TWO, admin_key="admin")
    headers = {"authorization": "Bearer admin"}
    loaded = server.request("POST", "/v1/load_lora_adapter?model=a", {"lora_name": "poet"}, headers)
    assert (loaded.status, loaded.body) == (200, b"{}")
    assert server.complete("poet").json["model"] == "a"


def test_at_a_signal_running_requests_end_with_the_processes(make_front: MakeFront) -> None:
    server = make_front(TWO)
    server.complete("a")
    child = server.front.model_of("a").child
    assert child is not None
    connection = server.connect(post_bytes("/v1/completions", {"model": "a", "prompt": "wait", "stream": True}))
    until(lambda: len(server.front.jobs) == 1)
    server.signal()
    assert read_all(connection).startswith(b"HTTP/1.1 503")
    server.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(make_front: MakeFront) -> None:
    server = make_front(TWO)
    request = post_bytes("/v1/completions", {"model": "a", "prompt": "one two", "stream": True})
    old = read_all(server.connect(request.replace(b"HTTP/1.1", b"HTTP/1.0")))
    assert old.partition(b"\r\n\r\n")[2] == b"data: one\n\ndata: two\n\n"
    connection: socket.socket = server.connect(request.replace(b"content-type", b"connection: close\r\ncontent-type"))
    assert body_of(read_all(connection)) == b"data: one\n\ndata: two\n\n"


def test_no_process_outlives_the_front(make_front: MakeFront) -> None:
    """Its standard input ends with the front, however that ends."""
    server = make_front(TWO)
    server.complete("a")
    child: Any = server.front.model_of("a").child
    server.loop.call_soon_threadsafe(child.process.stdin.close)
    until(lambda: server.states()["a"] == "not loaded")
