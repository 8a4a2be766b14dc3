"""The published description is what the server does: it has every endpoint, with the fields that are read."""

from __future__ import annotations

import json

from nanoengine.serve.server.bodies.protocol import ChatRequest, CompletionRequest
from nanoengine.serve.server.http.endpoint import Access
from nanoengine.serve.server.http.endpoints import ENDPOINTS, VIEW
from nanoengine.serve.server.http.openapi import document


def test_every_endpoint_is_described() -> None:
    described = {(path, method.upper()) for path, item in document(ENDPOINTS)["paths"].items() for method in item}
    assert described == {(own.path.replace(":path", ""), own.method) for own in ENDPOINTS}
    assert len(described) == len(ENDPOINTS)


def test_a_path_has_one_rule_of_access() -> None:
    """The rule is looked up by the path alone, and never for a path with parts that vary."""
    rules = {(own.path, own.access) for own in (*ENDPOINTS, VIEW)}
    assert len(rules) == len({path for path, _ in rules})
    assert all(access is Access.CLIENT for path, access in rules if "{" in path)


def test_parts_of_a_path_are_described() -> None:
    described = document(ENDPOINTS)["paths"]["/v1/models/{name}"]["get"]
    assert [(own["name"], own["in"]) for own in described["parameters"]] == [("name", "path")]


def test_schemas_have_all_fields_and_take_no_others() -> None:
    schemas = document(ENDPOINTS)["components"]["schemas"]
    for kind in (CompletionRequest, ChatRequest):
        schema = schemas[kind.__name__]
        assert set(schema["properties"]) == set(kind.__struct_fields__)
        assert schema["additionalProperties"] is False
    assert schemas["ChatRequest"]["required"] == ["messages"]


def test_all_references_are_there() -> None:
    schemas, text = document(ENDPOINTS)["components"]["schemas"], json.dumps(document(ENDPOINTS), separators=(",", ":"))
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in schemas
