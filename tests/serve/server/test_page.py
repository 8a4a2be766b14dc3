from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from nanoengine.features.observability.view import EngineView, view_of_engine
from nanoengine.serve.server.http.endpoints import VIEW
from nanoengine.serve.server.http.page import FILES, file_route
from tests.features.observability.toys import Observed

OBSERVED = Observed()


async def view() -> EngineView:
    return view_of_engine(OBSERVED.engine, OBSERVED.observer)


SERVING: Any = SimpleNamespace(view=SimpleNamespace(get=view))
ROUTES = [*map(file_route, FILES), VIEW.route(SERVING)]
PATHS = list(FILES.values())
SCRIPTS = [path for path in PATHS if path.endswith(".js") and not path.startswith("/vendor/")]
"""Of the page itself."""
get = TestClient(Starlette(routes=ROUTES)).get


def test_the_page_and_its_parts_are_there() -> None:
    assert {"/", "/page.css", "/page.js"} <= set(PATHS)
    for path in PATHS:
        answer = get(path)
        kind = {"/": "text/html", "css": "text/css", ".js": "text/javascript"}[path[-3:]]
        assert (answer.status_code, answer.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
        assert answer.text


def test_whatever_the_page_asks_for_is_there() -> None:
    html = get("/").text
    wanted = set(re.findall(r'(?:href|src)="([^"]+)"', html))
    for path in SCRIPTS:
        wanted |= set(re.findall(r'^import .* from "\./([^"]+)";$', get(path).text, re.MULTILINE))
    assert {f"/{name}" for name in wanted if not name.startswith("data:")} == set(PATHS) - {"/"}


def test_every_element_that_the_scripts_look_up_exists_once() -> None:
    ids = re.findall(r'\bid="([^"]+)"', get("/").text)
    assert len(set(ids)) == len(ids)
    scripts = "".join(get(path).text for path in SCRIPTS)
    assert set(re.findall(r'\$\("([^"]+)"\)', scripts)) <= set(ids)


def test_nothing_comes_from_another_host_and_nothing_is_html_but_the_page() -> None:
    for path in PATHS:
        headers, text = get(path).headers, get(path).text
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert policy["img-src"] == "data:"
        assert (policy["require-trusted-types-for"], policy["trusted-types"]) == ("'script'", "'none'")
        assert headers["x-content-type-options"] == "nosniff"
        if path.startswith("/vendor/"):
            continue  # where they come from stands in them; the policy holds for them too
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|style=\"|\bon\w+=\"", text
        )


@pytest.mark.parametrize("path", ["/", "/page.css", "/page.js"])
def test_a_browser_asks_again_and_is_told_that_nothing_has_changed(path: str) -> None:
    first = get(path)
    assert first.headers["cache-control"] == "no-cache"
    same = get(path, headers={"If-None-Match": first.headers["etag"]})
    assert (same.status_code, same.text, same.headers["etag"]) == (304, "", first.headers["etag"])
    other = get(path, headers={"If-None-Match": '"another"'})
    assert (other.status_code, other.text) == (200, first.text)


def test_views_are_those_of_this_moment() -> None:
    request = OBSERVED.add([5] * 6, 4, "seen")
    try:
        answer = get("/view")
        assert (answer.headers["content-type"], answer.headers["cache-control"]) == ("application/json", "no-store")
        shown = msgspec.json.decode(answer.content, type=EngineView)
        assert [(seq.request_id, seq.state) for seq in shown.sequences] == [("seen", "waiting")]
        OBSERVED.engine.step()
        assert msgspec.json.decode(get("/view").content, type=EngineView).sequences[0].state == "decode"
    finally:
        OBSERVED.engine.abort(request.request_id)
    assert msgspec.json.decode(get("/view").content, type=EngineView).sequences == []


def test_only_reading_is_allowed() -> None:
    client = TestClient(Starlette(routes=ROUTES))
    assert {client.post(path).status_code for path in [*PATHS, "/view"]} == {405}
    assert client.get("/page.py").status_code == 404
