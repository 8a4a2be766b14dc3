"""What those who run a server ask for: health, models, aborting, forgetting the cache."""

from __future__ import annotations

import http.client
from typing import Any

import pytest

import nanoengine
from tests.serve.server.conftest import MakeServer
from tests.serve.server.events import reasons_of, text_of
from tests.serve.server.running import PATIENCE, Server, in_thread, until


def test_health_and_version(parrot: Server) -> None:
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = parrot.request(method, path)
        assert (answer.status, answer.body) == (200, b"")
    assert parrot.get("/version").json == {"version": nanoengine.__version__}


def test_the_model_has_each_of_its_names(make_server: MakeServer) -> None:
    server = make_server(served_model_name=("first", "org/second"))
    models = server.get("/v1/models").json
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["first", "org/second"]
    for model in models["data"]:
        assert (model["object"], model["owned_by"], model["max_model_len"]) == ("model", "nanoengine", 1024)
        assert server.get(f"/v1/models/{model['id']}").json == model
        answer = server.complete("a", max_tokens=1, model=model["id"]).json
        assert answer["model"] == "first"
    assert server.get("/v1/models/parrot").status == 404
    refused = server.complete("a", model="parrot")
    assert (refused.status, refused.error["type"], refused.error["param"]) == (404, "NotFoundError", "model")
    assert server.complete("a", max_tokens=1).status == 200, "a name is not asked for"


@pytest.mark.parametrize(
    ("status", "method", "path"),
    [
        *((404, "GET", "/nowhere"), (404, "POST", "/v1/audio/speech"), (405, "GET", "/v1/completions")),
        *((405, "DELETE", "/v1/models"), (405, "POST", "/health"), (405, "PUT", "/tokenize")),
    ],
)
def test_other_paths_and_methods_have_the_shape_of_errors(parrot: Server, method: str, path: str, status: int) -> None:
    answer = parrot.request(method, path, {} if method != "GET" else None)
    assert answer.status == status
    assert answer.error["type"] in ("NotFoundError", "MethodNotAllowedError")
    if status == 405:
        assert answer.headers["allow"]


def test_ollamas_clients_ask_whether_somebody_is_there(make_server: MakeServer) -> None:
    for page in (True, False):
        server = make_server(page=page, api_key=("a",))
        connection = http.client.HTTPConnection(*server.address, timeout=PATIENCE)
        connection.request("HEAD", "/")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"")
        connection.close()


def test_load_is_the_number_of_answers_being_made(make_server: MakeServer) -> None:
    server = make_server()
    assert server.get("/load").json == {"server_load": 0}
    server.gate.shut()
    both = server.later(server.complete, "abc"), server.later(server.chat, "abc", stream=True)
    until(lambda: server.get("/load").json == {"server_load": 2})
    server.gate.open()
    assert [one.result().status for one in both] == [200, 200]
    until(lambda: server.get("/load").json == {"server_load": 0})


@pytest.mark.parametrize("stream", [False, True])
def test_requests_may_be_aborted_by_the_ids_of_their_answers(make_server: MakeServer, stream: bool) -> None:
    server = make_server()
    fields = {"max_tokens": 300, "n": 2, "stream": stream}
    server.gate.shut()
    one = server.later(server.complete, "a" * 300, request_id="one", **fields)
    two = server.later(server.complete, "b" * 300, request_id="two", **fields)
    server.gate.let(5)
    until(lambda: server.gate.num_steps == 5)
    assert server.post("/abort_requests", {"request_ids": ["nobody"]}).json["aborted"] == 0
    assert server.post("/abort_requests", {"request_ids": ["cmpl-one", "cmpl-one"]}).json["aborted"] == 1
    server.gate.open()
    for answer, reason in ((one.result(), "abort"), (two.result(), "length")):
        for index in (0, 1):
            found = reasons_of(answer.events, index) if stream else [answer.json["choices"][index]["finish_reason"]]
            assert found == [reason]
    assert not stream or text_of(one.result().events) in "a" * 300
    server.check_idle()


@pytest.mark.parametrize("body", [{}, {"request_ids": None}], ids=str)
def test_all_may_be_aborted(make_server: MakeServer, body: Any) -> None:
    """By an admin: without keys, the clients behind a proxy have one address."""
    server, root = make_server({"max_num_seqs": 1}, admin_key="root"), {"authorization": "Bearer root"}
    server.gate.shut()
    later = [server.later(server.chat, "a" * 200, max_tokens=200) for _ in range(3)]
    assert server.post("/abort_requests", {"request_ids": []}, root).json["aborted"] == 0, "it names none"
    assert server.post("/abort_requests", body).status == 403
    assert server.post("/abort_requests", body, root).json == {"status": "aborted", "aborted": 3}
    server.gate.let()
    assert [answer.result().json["choices"][0]["finish_reason"] for answer in later] == ["abort"] * 3
    server.check_idle()
    assert server.post("/abort_requests", {}, root).json["aborted"] == 0


def test_nobody_aborts_the_requests_of_others_but_an_admin(make_server: MakeServer) -> None:
    server = make_server(api_key=("one", "two"), admin_key="root")
    one, two, root = ({"authorization": f"Bearer {key}"} for key in ("one", "two", "root"))
    server.gate.shut()
    later = server.later(server.post, "/v1/completions", {"prompt": "a" * 50, "max_tokens": 50, "request_id": "x"}, one)
    for body in ({}, {"request_ids": ["cmpl-x"]}):
        assert server.post("/abort_requests", body, two).json["aborted"] == 0
    assert server.post("/abort_requests", {}, root).json["aborted"] == 1
    server.gate.open()
    assert later.result().json["choices"][0]["finish_reason"] == "abort"


def test_an_admin_alone_sees_and_forgets_what_is_of_all(make_server: MakeServer) -> None:
    server = make_server(api_key=("one",), admin_key="root")
    for method, path in (("GET", "/view"), ("POST", "/reset_prefix_cache")):
        refused = server.request(method, path, headers={"authorization": "Bearer one"})
        assert (refused.status, refused.error["type"]) == (401, "AuthenticationError")
        assert "admin_key" in refused.error["message"]
        assert server.request(method, path, headers={"authorization": "Bearer root"}).status == 200


def test_no_spelling_of_a_path_leads_around_the_admin_key(make_server: MakeServer) -> None:
    """A route ends where a line does, and the end of a line may stand behind that."""
    for server, asked in (
        (make_server(api_key=("one",), admin_key="root"), ("/reset_prefix_cache", "/v1/load_lora_adapter")),
        (make_server(), ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")),
    ):
        for path in asked:
            for end, status in (("", (401, 403)), ("%0A", (400,)), ("%0a%0a", (400,)), ("/", (404,)), ("%00", (400,))):
                body = {"lora_name": "a", "lora_path": "b"}
                answer = server.post(path + end, body, {"authorization": "Bearer one"})
                assert answer.status in status, (path, end)
    assert server.get("/v1/models%0A").status == 400


def test_clients_of_different_keys_share_no_prefixes(make_server: MakeServer) -> None:
    def num_cached(server: Server, key: str, **fields: Any) -> int:
        body = {"prompt": "abcdefghijkl", "max_tokens": 1, **fields}
        answer = server.post("/v1/completions", body, {"authorization": f"Bearer {key}"})
        return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    several = make_server(api_key=("one", "two"))
    assert [num_cached(several, key) for key in ("one", "two", "one", "two")] == [0, 0, 8, 8]
    assert num_cached(several, "two", cache_salt="key-0 ") == 0, "no salt leads to the cache of another"
    alone = make_server(api_key=("one",))
    assert [num_cached(alone, "one"), num_cached(alone, "one")] == [0, 8]


def test_who_asks_for_metrics_without_a_pause_is_told_the_same_for_a_second(make_server: MakeServer) -> None:
    server = make_server()
    server.serving.metrics_text.seconds = 1000
    before = server.get("/metrics").body
    assert server.complete("a", max_tokens=1).status == 200
    assert server.get("/metrics").body == before
    server.serving.metrics_text.seconds = 0
    assert server.get("/metrics").body != before


def test_the_prefix_cache_may_be_forgotten_when_nothing_runs(make_server: MakeServer) -> None:
    server = make_server()

    def num_cached() -> int:
        usage = server.complete("abcdefgh", max_tokens=2).json["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    server.gate.shut()
    running = server.later(server.complete, "x" * 50, max_tokens=50)
    server.gate.let(3)
    server.gate.wait_until_held()
    reset = in_thread(server.post, "/reset_prefix_cache", b"")
    until(server.serving.engine._inbox.qsize)
    server.gate.let()
    assert reset.result().json == {"success": False}
    server.gate.open()
    assert running.result().status == 200
    assert [num_cached(), num_cached()] == [0, 4]
    assert server.post("/reset_prefix_cache", b"").json == {"success": True}
    assert num_cached() == 0
