"""The document of GET /openapi.json, made from the table of endpoints and from the types that requests are read as."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec

import nanoengine
from nanoengine.serve.server.http.endpoint import Endpoint


class ErrorFields(msgspec.Struct):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: int | str


class Error(msgspec.Struct):
    """A refusal or a failure."""

    error: ErrorFields


@cache
def document(endpoints: tuple[Endpoint, ...]) -> dict[str, Any]:
    """The description of some endpoints, as OpenAPI 3.1 has it."""
    bodies = {endpoint.body: None for endpoint in endpoints if endpoint.body is not None}
    types = [*bodies, Error]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        described: dict[str, Any] = {"summary": endpoint.summary, "responses": _responses(endpoint.stream)}
        if endpoint.body is not None:
            content = {"application/json": {"schema": schema_of[endpoint.body]}}
            described["requestBody"] = {"required": True, "content": content}
        if names := re.findall(r"{(\w+)", endpoint.path):
            described["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        paths.setdefault(endpoint.path.replace(":path}", "}"), {})[endpoint.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "nanoengine", "version": nanoengine.__version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _responses(stream: str) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {}} | ({stream: {}} if stream else {})
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "200": {"description": "done", "content": content},
        "default": {"description": "refused, or failed", "content": error},
    }
