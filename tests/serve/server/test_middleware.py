"""Who is let in, what each request is called, and what the log says of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from nanoengine.errors import InvalidConfig
from nanoengine.serve.server.admission.work_share import WorkShare
from nanoengine.serve.server.config import ServerConfig
from nanoengine.serve.server.errors import APIError
from nanoengine.serve.server.http.middleware import ClientMiddleware
from tests.serve.server.conftest import MakeServer
from tests.serve.server.parrot import build
from tests.serve.server.running import Server, read_all, until

KEYS = ("first-key", "zweiter-schlüssel")
ASKED = "v1/completions v1/chat/completions tokenize detokenize abort_requests reset_prefix_cache restart_replicas"
READ = "tokenizer_info load v1/models v1/models/parrot no/such/path health/ /health v1/../health"
GUARDED = [(method, f"/{path}") for method, paths in (("POST", ASKED), ("GET", READ)) for path in paths.split()]
OPEN = ["/", "/metrics", "/health", "/ping", "/version", "/openapi.json"]
NO_KEYS = [
    *(None, "", "Bearer", "Bearer ", "Bearer first-ke", "Bearer first-keyy", "Bearer FIRST-KEY", "Basic first-key"),
    *("first-key", "Bearer first-key zweiter-schlüssel"),
]


@pytest.fixture(scope="module")
def guarded(tokenizer_folder: Path) -> Iterator[Server]:
    with closing(Server(build(tokenizer_folder), "parrot", api_key=KEYS)) as server:
        yield server


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The access log. A line is written after its answer: see `line_of`."""
    caplog.set_level(logging.INFO, "nanoengine.access")
    return caplog


def line_of(log: pytest.LogCaptureFixture, request_id: str) -> str:
    """What the log says of a request, when it does."""
    until(lambda: any(f"request_id={request_id} " in line for line in log.messages))
    [line] = [line for line in log.messages if f"request_id={request_id} " in line]
    return line


# ---- keys


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_without_a_key_nothing_is_answered(guarded: Server, method: str, path: str) -> None:
    for key in NO_KEYS:
        answer = guarded.request(
            method, path, {} if method == "POST" else None, {"authorization": key} if key is not None else {}
        )
        assert answer.status == 401
        assert answer.error["type"] == "AuthenticationError"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert not any(key in answer.body.decode() for key in KEYS)


def test_each_key_lets_in_and_some_paths_need_none(guarded: Server) -> None:
    for kind in ("Bearer ", "bearer ", "BEARER  "):
        for key in KEYS:
            value = (kind + key).encode().decode("latin-1")  # as UTF-8 on the wire
            assert guarded.get("/v1/models", {"authorization": value}).status == 200
    wrong: list[dict[str, str]] = [{"x-api-key": "first-keys"}, {"x-api-key": ""}]
    wrong.append({"authorization": "Bearer no", "x-api-key": "first-key"})
    for headers in ({"x-api-key": "first-key"}, *wrong):  # as Anthropic's clients send it
        assert guarded.get("/v1/models", headers).status == (401 if headers in wrong else 200)
    assert [guarded.get(path).status for path in OPEN] == [200] * len(OPEN)


def test_a_key_is_called_by_its_number_in_the_log(guarded: Server, log: pytest.LogCaptureFixture) -> None:
    guarded.get("/v1/models", {"authorization": "Bearer first-key", "x-request-id": "with-a-key"})
    line = line_of(log, "with-a-key")
    assert " client=key-0 " in line
    assert not any(key in line for key in KEYS)


# ---- ids


def test_a_request_has_an_id_of_its_own_or_the_clients(parrot: Server) -> None:
    first, second = (parrot.get("/version").headers["x-request-id"] for _ in range(2))
    assert first != second
    assert parrot.get("/version", {"X-Request-Id": "mine-7"}).headers["x-request-id"] == "mine-7"
    answer = parrot.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, {"X-Request-Id": "mine-8"})
    assert answer.json["id"] == "cmpl-mine-8"
    assert parrot.complete("a", max_tokens=1, request_id="mine-9").json["id"] == "cmpl-mine-9"
    assert parrot.chat("a", max_tokens=1, request_id="mine-9").json["id"] == "chatcmpl-mine-9"


@pytest.mark.parametrize("value", ["", "x" * 129, "x" * 30_000, "naïve", 'a"b', "a\tb"], ids=lambda own: ascii(own)[:9])
def test_an_id_that_no_log_could_hold_is_replaced(parrot: Server, value: str) -> None:
    given = parrot.get("/version", {"X-Request-Id": value}).headers["x-request-id"]
    assert given != value
    assert given.isalnum()
    assert len(given) < 100, "every chunk of a stream has it"
    if len(value) > 128:
        refused = parrot.complete("a", stream=True, request_id=value)
        assert (refused.status, refused.error["param"]) == (400, "request_id")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_answers_to_errors_have_the_id_and_whoever_is_refused_pays(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if status == 500:
            raise LookupError("nobody has foreseen it")
        await APIError(status, "no room").response(scope)(scope, receive, send)

    async def send(message: Message) -> None:
        sent.append(message)

    sent, share = list[Message](), WorkShare()
    paid = list[str]()
    monkeypatch.setattr(share, "refused", paid.append)
    headers = [(b"host", b"127.0.0.1"), (b"x-request-id", b"mine")]
    scope = {"type": "http", "method": "POST", "path": "/x", "http_version": "1.1", "headers": headers}
    asyncio.run(ClientMiddleware(app, ServerConfig(), (), share)(scope, lambda: None, send))  # type: ignore[arg-type, return-value]
    assert sent[0]["status"] == status
    assert (b"x-request-id", b"mine") in sent[0]["headers"]
    assert bool(paid) == (status != 500)


# ---- the log


def test_one_line_says_who_what_and_how_it_ended(parrot: Server, log: pytest.LogCaptureFixture) -> None:
    answer = parrot.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, {"X-Request-Id": "seen"})
    line = line_of(log, "seen")
    start, _, seconds = line.rpartition(" seconds=")
    assert start == (
        f'request_id=seen client=127.0.0.1 method=POST path="/v1/completions" status=200 bytes={len(answer.body)}'
    )
    assert float(seconds) >= 0


ODD = [
    "/%0a%0dx",
    "/%00%1b[31m",
    '/a"%20status=200%20x="',
    "/%22%20status=200",
    "/%e2%80%a8",
    "/%7f",
    "/%5c%22",
    "/%ff",
]


@pytest.mark.parametrize("path", ODD)
def test_no_path_writes_more_into_the_log_than_itself(parrot: Server, log: pytest.LogCaptureFixture, path: str) -> None:
    connection = parrot.connect(
        f"GET {path} HTTP/1.1\r\nhost: localhost\r\nx-request-id: odd\r\nconnection: close\r\n\r\n".encode()
    )
    read_all(connection)
    line = line_of(log, "odd")
    assert line.isascii()
    assert line.isprintable()
    quoted = line.replace("\\\\", "").replace('\\"', "")  # of what is left, every quote means one
    assert quoted.count('"') == 4  # around the path and the reason
    assert line.count(" status=") == 1 or '\\" status=' in line


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        ("/v1/completions", {"prompt": "a", "thinks": 1}, "thinks is not supported: leave it out"),
        ("/v1/completions", {"prompt": "a", "prompt_embeds": "b"}, "prompt_embeds is not supported: leave it out"),
        (
            "/v1/completions",
            b'{"prompt": "a", "guided_json": 1e999}',
            "guided_json is not supported: give structured_outputs",
        ),
        (
            "/v1/completions",
            b'{"prompt": "a", "prompt_embeds": "\xff"}',
            "prompt_embeds is not supported: leave it out",
        ),
        ("/v1/messages", {"max_tokens": 1, "messages": [{}]}, "messages[0]"),
        ("/api/chat", {"model": "x" * 1000}, "The model `xxx"),
    ],
)
def test_the_log_says_why_a_request_is_refused(
    parrot: Server, log: pytest.LogCaptureFixture, path: str, fields: dict[str, object] | bytes, reason: str
) -> None:
    name = f"why{path}{len(reason)}"
    assert parrot.post(path, fields, {"x-request-id": name}).status in (400, 404)
    line = line_of(log, name)
    assert reason in line.partition(' reason="')[2]
    assert len(line) < 600
    assert parrot.post("/v1/completions", {"prompt": "a"}, {"x-request-id": f"{name}-fine"}).status == 200
    assert "reason=" not in line_of(log, f"{name}-fine")


def test_the_log_can_be_switched_off(make_server: MakeServer, log: pytest.LogCaptureFixture) -> None:
    server = make_server(access_log=False)
    assert server.get("/version", {"x-request-id": "quiet"}).status == 200
    server.close()  # what would have been written, is
    assert not any("request_id=quiet " in line for line in log.messages)


# ---- pages of other sites

PREFLIGHT = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}


def test_no_other_page_may_read_answers_unless_it_is_named(make_server: MakeServer, parrot: Server) -> None:
    named = make_server(cors_origin=("http://a.example",), api_key=("key",))
    for path in ("/version", "/v1/models", "/nowhere"):
        assert not [name for name in parrot.get(path, {"Origin": "http://a.example"}).headers if "access-con" in name]
    assert parrot.request("OPTIONS", "/v1/completions", headers=PREFLIGHT).status == 405
    allowed = named.request("OPTIONS", "/v1/completions", headers=PREFLIGHT)
    assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, "http://a.example")
    other = named.request("OPTIONS", "/v1/completions", headers=PREFLIGHT | {"Origin": "http://b.example"})
    assert other.status == 400
    assert named.get("/version", {"Origin": "http://b.example"}).headers.get("access-control-allow-origin") is None
    refused = named.get("/v1/models", {"Origin": "http://a.example"})
    assert refused.status == 401, "it is no key"
    long = named.post("/v1/completions", b"x" * ((8 << 20) + 1), {"Origin": "http://a.example"})
    nowhere = named.get("/nowhere", {"Origin": "http://a.example", "authorization": "Bearer key"})
    assert [long.status, nowhere.status] == [413, 404]
    for answer in (refused, long, nowhere):
        assert answer.headers["access-control-allow-origin"] == "http://a.example", "or no page could say why"


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "application/octet-stream"]
)
def test_what_a_page_may_send_unasked_is_not_read(parrot: Server, kind: str) -> None:
    """Browsers say of each request where it comes from. Programs do not: JSON of theirs may be called a form, as curl does."""
    before = parrot.metrics().num_requests
    from_pages: list[dict[str, str]] = [{"origin": parrot.url}, {"sec-fetch-site": "cross-site"}]
    is_of_programs = kind not in ("text/plain", "multipart/form-data")
    for headers in [*from_pages, *([] if is_of_programs else [{}])]:
        answer = parrot.post("/v1/completions", b'{"prompt": "a"}', {"content-type": kind, **headers})
        assert answer.status == 400
        assert "application/json" in answer.error["message"]
        assert parrot.metrics().num_requests == before
    assert (
        parrot.post("/v1/completions", b'{"prompt": "a"}', {"content-type": kind, "origin": "http://b.example"}).status
        == 403
    )
    if is_of_programs:
        body = b'{"model": "parrot", "prompt": "a", "stream": false}'
        for path in ("/v1/completions", "/api/generate"):
            assert parrot.post(path, body, {"content-type": kind}).status == 200


def test_a_page_of_another_site_may_not_send_json_either(parrot: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert parrot.post("/v1/completions", body, {"origin": "http://a.example"}).status == 403
    assert parrot.post("/v1/completions", body, {"origin": parrot.url}).status == 200


# ---- hosts


def test_on_a_loopback_address_nobody_comes_by_another_name(make_server: MakeServer) -> None:
    server = make_server(allowed_host=("engine.example",))
    for host in ("localhost", "127.0.0.1:8000", "[::1]:80", "LOCALHOST:1", "engine.example:443"):
        assert server.get("/view", {"host": host}).status == 200, host
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "[::2]"):
        refused = server.get("/view", {"host": host})
        assert refused.status == 403
        assert "allowed_host" in refused.error["message"]


@pytest.mark.parametrize(
    ("config", "any_name"), [({"host": "0.0.0.0"}, True), ({"host": "127.0.0.2"}, False), ({"host": "::1"}, False)]
)
def test_elsewhere_every_name_is_allowed_unless_some_are_given(config: dict[str, str], any_name: bool) -> None:
    assert (ServerConfig(**config).hosts is None) == any_name  # type: ignore[arg-type]
    assert "a.example" in (ServerConfig(**config, allowed_host=("a.example",)).hosts or ())  # type: ignore[arg-type]


# ---- proxies


@pytest.mark.parametrize(
    ("trusted", "forwarded", "client"),
    [
        (None, "1.2.3.4", "127.0.0.1"),
        (("10.0.0.0/8",), "1.2.3.4", "127.0.0.1"),
        (("127.0.0.1", "10.0.0.0/8"), "9.9.9.9, 1.2.3.4, 10.0.0.7", "1.2.3.4"),
        (("127.0.0.1",), "2001:db8:0:1::5", "2001:db8:0:1::/64"),
        (("*",), "1.2.3.4, 5.6.7.8", "1.2.3.4"),
        (("*",), "admin", "unknown"),
    ],
)
def test_a_proxy_that_is_trusted_says_who_asks(
    make_server: MakeServer, log: pytest.LogCaptureFixture, trusted: tuple[str, ...] | None, forwarded: str, client: str
) -> None:
    server = make_server(forwarded_allow_ips=trusted, admin_key="root")
    headers = {"x-forwarded-for": forwarded, "x-request-id": "forwarded"}
    assert server.post("/abort_requests", {}, headers).status == 403, "nobody becomes an admin by it"
    assert f" client={client} " in line_of(log, "forwarded")


def test_proxies_are_addresses() -> None:
    with pytest.raises(InvalidConfig, match="forwarded_allow_ips holds 'proxy'"):
        ServerConfig(forwarded_allow_ips=("127.0.0.1", "proxy"))
