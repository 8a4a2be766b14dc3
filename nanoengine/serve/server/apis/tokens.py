"""POST /tokenize, /detokenize and /apply-template, GET /tokenizer_info: for clients that count or build prompts."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.serve.server.apis.json_response import json_response
from nanoengine.serve.server.bodies.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from nanoengine.serve.server.errors import APIError
from nanoengine.serve.server.scope import CLIENT
from nanoengine.serve.server.served_model import ServedModel


async def tokenize(http: HTTPRequest, serving: ServedModel) -> Response:
    """Token ids of a prompt, or of messages in the chat template."""
    request = await serving.read(http, TokenizeRequest)
    return await serving.jobs.while_connected(
        http.receive, serving.text.run(_tokenized, serving, request, http.scope[CLIENT])
    )


def _tokenized(serving: ServedModel, request: TokenizeRequest, client: str) -> Response:
    if request.messages is None:
        field, text, special = "prompt", request.prompt or "", request.add_special_tokens is not False
        if request.content is not None:
            field, text, special = "content", request.content, bool(request.add_special)
        serving.prompts.check_chars(text, field)
        token_ids = serving.tokenizer.encode(text, add_special_tokens=special)
    else:
        special = bool(request.add_special_tokens)
        text = serving.prompts.of_chat(request).text
        serving.prompts.check_chars(text, "messages")
        token_ids = serving.prompts.chat_encoder.encode(text, client=client, add_special_tokens=special)
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": serving.max_model_len,
            "tokens": token_ids,
            "token_strs": serving.tokenizer.pieces(token_ids) if request.return_token_strs else None,
        }
    )


async def detokenize(http: HTTPRequest, serving: ServedModel) -> Response:
    """The text of tokens, special ones included."""
    request = await serving.read(http, DetokenizeRequest)
    return await serving.jobs.while_connected(http.receive, serving.text.run(_detokenized, serving, request.tokens))


def _detokenized(serving: ServedModel, tokens: list[int]) -> Response:
    vocab_size = serving.engine.engine.vocab_size
    highest = max(tokens, default=0)
    if highest >= vocab_size:
        raise APIError(400, f"tokens holds {highest}: the vocabulary has {vocab_size} tokens", "tokens")
    text = serving.tokenizer.decode(tokens, skip_special_tokens=False)
    return json_response({"prompt": text, "content": text})  # vLLM's name, and llama.cpp's


async def apply_template(http: HTTPRequest, serving: ServedModel) -> Response:
    """A conversation in the chat template, as llama.cpp's clients count it."""
    request = await serving.read(http, ChatRequest)
    prompt = await serving.jobs.while_connected(http.receive, serving.text.run(serving.prompts.of_chat, request))
    return json_response({"prompt": prompt.text})


async def tokenizer_info(_: HTTPRequest, serving: ServedModel) -> Response:
    """Special tokens, the chat template and the longest sequence, for clients that render and count by themselves."""
    info: dict[str, Any] = await serving.text.run(serving.tokenizer.info)
    return json_response(info | {"model_max_length": serving.max_model_len})
