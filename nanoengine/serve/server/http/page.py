"""The page at `/`, which shows the engine while it works, and GET /view, its data. The files are in the folder `page`."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nanoengine.serve.server.served_model import ServedModel

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
"""Media types of the page's files, by the ends of their names."""

_FOLDER = Path(__file__).with_name("page")

_NAMES = (file.relative_to(_FOLDER).as_posix() for file in _FOLDER.rglob("*") if file.suffix in MEDIA_TYPES)
FILES = {name: "/" if name == "index.html" else f"/{name}" for name in _NAMES}
"""The path of each file of the page. The files have no data of clients; licences are not served."""

HEADERS = {
    # Nothing from another host, nothing inline, no frame around it, and no script may make HTML of a text: what a model writes
    # can only ever be text.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


async def show_view(_: Request, serving: ServedModel) -> Response:
    """The state of the engine between two steps (`EngineView`) as JSON."""
    body = msgspec.json.encode(await serving.view.get())
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return Response(body, media_type="application/json", headers=headers)


def file_route(name: str) -> Route:
    """The route of a file of the page, which is read now. A browser may keep the file, and asks each time for changes."""
    body = (_FOLDER / name).read_bytes()
    media_type = MEDIA_TYPES[Path(name).suffix]
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = HEADERS | {"Cache-Control": "no-cache", "ETag": etag}

    async def show_file(request: Request) -> Response:
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=media_type, headers=headers)

    return Route(FILES[name], show_file)
