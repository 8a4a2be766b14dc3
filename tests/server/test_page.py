from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import msgspec
import pytest
from starlette.applications import Starlette

from nanoengine.observability.view import EngineView, take_view
from nanoengine.server.page import page_routes
from tests.observability.toys import Observed

OBSERVED = Observed()


async def view() -> EngineView:
    return take_view(OBSERVED.engine, OBSERVED.observer)


def get(path: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one request."""
    messages = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        messages.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
    }
    asyncio.run(Starlette(routes=page_routes(view))(scope, receive, send))
    fields = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    return messages[0]["status"], fields, b"".join(message.get("body", b"") for message in messages[1:])


def paths() -> list[str]:
    return [route.path for route in page_routes(view) if route.path != "/view"]


def test_the_page_and_its_parts_are_there() -> None:
    assert {"/", "/page.css", "/page.js"} <= set(paths())
    for path in paths():
        status, headers, body = get(path)
        kind = {"/": "text/html", "css": "text/css", ".js": "text/javascript"}[path[-3:]]
        assert (status, headers["content-type"]) == (200, f"{kind}; charset=utf-8")
        assert body


def test_whatever_the_page_asks_for_is_there() -> None:
    html = get("/")[2].decode()
    wanted = set(re.findall(r'(?:href|src)="([^"]+)"', html))
    for path in (path for path in paths() if path.endswith(".js")):
        wanted |= set(re.findall(r'^import .* from "\./([^"]+)";$', get(path)[2].decode(), re.MULTILINE))
    assert {f"/{name}" for name in wanted if not name.startswith("data:")} == set(paths()) - {"/"}


def test_every_element_that_the_scripts_look_up_exists_once() -> None:
    ids = re.findall(r'\bid="([^"]+)"', get("/")[2].decode())
    assert len(set(ids)) == len(ids)
    scripts = "".join(get(path)[2].decode() for path in paths() if path.endswith(".js"))
    assert set(re.findall(r'\$\("([^"]+)"\)', scripts)) <= set(ids)


def test_nothing_comes_from_another_host_and_nothing_is_html_but_the_page() -> None:
    for path in paths():
        headers, text = get(path)[1], get(path)[2].decode()
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|style=\"|\bon\w+=\"", text
        )


@pytest.mark.parametrize("path", ["/", "/page.css", "/page.js"])
def test_a_browser_asks_again_and_is_told_that_nothing_has_changed(path: str) -> None:
    _, headers, body = get(path)
    assert headers["cache-control"] == "no-cache"
    same = get(path, {"If-None-Match": headers["etag"]})
    assert (same[0], same[2]) == (304, b"")
    assert same[1]["etag"] == headers["etag"]
    assert get(path, {"If-None-Match": '"another"'})[::2] == (200, body)


def test_views_are_those_of_this_moment() -> None:
    request = OBSERVED.add([5] * 6, 4, "seen")
    try:
        status, headers, body = get("/view")
        assert (status, headers["content-type"], headers["cache-control"]) == (200, "application/json", "no-store")
        shown = msgspec.json.decode(body, type=EngineView)
        assert [(seq.request_id, seq.state) for seq in shown.sequences] == [("seen", "waiting")]
        OBSERVED.engine.step()
        assert msgspec.json.decode(get("/view")[2], type=EngineView).sequences[0].state == "decode"
    finally:
        OBSERVED.engine.abort(request.request_id)
    assert msgspec.json.decode(get("/view")[2], type=EngineView).sequences == []


def test_only_reading_is_allowed() -> None:
    assert {get(path, method="POST")[0] for path in [*paths(), "/view"]} == {405}
    assert get("/page.py")[0] == 404
