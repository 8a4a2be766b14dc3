"""What clients ask the text of an answer to be: OpenAI's, vLLM's and llama.cpp's ways to say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoengine.server.errors import Problem
from nanoengine.server.protocol import Generation


def is_structured(request: Generation) -> bool:
    """Whether any of the fields is there: a schema may be long, and takes a while to read."""
    return any((request.response_format, request.structured_outputs, request.json_schema, request.grammar))


def structured_outputs(request: Generation) -> dict[str, Any] | None:
    """The fields of `StructuredOutputs`; None if the text may be anything.

    Raises:
        Problem: a `response_format` of no known type or without its schema, or several fields that each say what the text is.
    """
    found: dict[str, dict[str, Any]] = {}
    if (own := _of_format(request.response_format)) is not None:
        found["response_format"] = own
    if request.structured_outputs is not None:
        found["structured_outputs"] = request.structured_outputs
    if request.json_schema is not None:
        found["json_schema"] = {"json": request.json_schema}
    if request.grammar:
        found["grammar"] = {"grammar": request.grammar}
    if len(found) > 1:
        raise Problem(400, f"{' and '.join(found)} each say what the text is: give one of them", list(found)[1])
    return next(iter(found.values()), None)


def _of_format(table: Mapping[str, Any] | None) -> dict[str, Any] | None:
    kind = None if table is None else table.get("type")
    if table is None or kind == "text":
        return None
    if kind == "json_object":  # llama.cpp takes a schema here
        schema = table.get("schema")
        return {"json_object": True} if schema is None else {"json": schema}
    if kind == "json_schema":
        inner = table.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        schema = table.get("schema") if schema is None else schema
        if schema is None:
            raise Problem(400, "response_format of type json_schema must have json_schema.schema", "response_format")
        return {"json": schema}
    if kind == "structural_tag":
        return {"structural_tag": {name: value for name, value in table.items() if name != "type"}}
    message = "response_format must have a type: text, json_object, json_schema or structural_tag"
    raise Problem(400, message, "response_format")
