"""Structured outputs of requests: the fields of OpenAI, vLLM and llama.cpp as those of `StructuredOutputs`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nanoengine.errors import InvalidPrompt, InvalidSamplingParams
from nanoengine.serve.server.bodies.protocol import Generation, Queued
from nanoengine.serve.server.errors import APIError, api_error_of


def is_structured(request: Generation) -> bool:
    """Whether a request has structured outputs: their schema may be long, and is then read in a thread."""
    return any((request.response_format, request.structured_outputs, request.json_schema, request.grammar))


@contextmanager
def named_as_sent(request: Queued) -> Iterator[None]:
    """A context in which errors about the prompt, `structured_outputs` and other fields get the names that the client has sent.

    Raises:
        InvalidSamplingParams, APIError: the error, with the name of that field.
    """
    try:
        yield
    except InvalidSamplingParams as error:
        field = error.field or ""
        if field.startswith("structured_outputs") and getattr(request, "structured_outputs", None) is None:
            sent = [name for name in ("response_format", "json_schema", "grammar") if getattr(request, name, None)]
            field = [*sent, "tools"][0]  # a tool has a schema where nothing else has one
        raise InvalidSamplingParams(request.name_of(field), error.args[-1]) from error
    except (InvalidPrompt, APIError) as error:
        problem = api_error_of(error)
        if problem.param == "prompt":
            problem.param = request.name_of("prompt")
            problem.message = re.sub(r"^prompt\b", problem.param, problem.message)
        raise problem from None


def structured_outputs(request: Generation) -> dict[str, Any] | None:
    """The fields of `StructuredOutputs`; None: the text is free.

    Raises:
        APIError: a `response_format` of no known type or without its schema, or several fields that each say what the text is.
    """
    fields = {
        "response_format": _of_format(request.response_format),
        "structured_outputs": request.structured_outputs,
        "json_schema": None if request.json_schema is None else {"json": request.json_schema},
        "grammar": {"grammar": request.grammar} if request.grammar else None,
    }
    outputs = {name: value for name, value in fields.items() if value is not None}
    if len(outputs) > 1:
        raise APIError(400, f"{' and '.join(outputs)} each say what the text is: give one of them", list(outputs)[1])
    return next(iter(outputs.values()), None)


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
            raise APIError(400, "response_format of type json_schema must have json_schema.schema", "response_format")
        return {"json": schema}
    if kind == "structural_tag":
        return {"structural_tag": {name: value for name, value in table.items() if name != "type"}}
    message = "response_format must have a type: text, json_object, json_schema or structural_tag"
    raise APIError(400, message, "response_format")
