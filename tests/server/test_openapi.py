"""The published description is what the server does: its paths exist, its schemas are those that requests are read with."""

from __future__ import annotations

import json

from nanoengine.server.app import ROUTES, adapter_routes, pooling_routes
from nanoengine.server.openapi import document
from nanoengine.server.protocol import ChatRequest, CompletionRequest


def test_every_path_that_is_described_exists_with_its_method() -> None:
    described = {(path, method.upper()) for path, item in document()["paths"].items() for method in item}
    served = {
        (route.path, method)
        for route in [*ROUTES, *pooling_routes(), *adapter_routes()]
        for method in route.methods or ()
    }
    assert described <= served
    posts = {path for path, method in served if method == "POST"} - {"/ping"}
    assert {path for path, method in described if method == "POST"} == posts


def test_schemas_have_all_fields_and_take_no_others() -> None:
    schemas = document()["components"]["schemas"]
    for kind in (CompletionRequest, ChatRequest):
        schema = schemas[kind.__name__]
        assert set(schema["properties"]) == set(kind.__struct_fields__)
        assert schema["additionalProperties"] is False
    assert schemas["ChatRequest"]["required"] == ["messages"]


def test_all_references_are_there() -> None:
    schemas, text = document()["components"]["schemas"], json.dumps(document(), separators=(",", ":"))
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in schemas
