"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's tokenizer, for clients that count or build prompts."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.serve.server.answers import json_response
from nanoengine.serve.server.errors import Problem
from nanoengine.serve.server.protocol import DetokenizeRequest, TokenizeRequest
from nanoengine.serve.server.scope import CLIENT
from nanoengine.serve.server.serving import Serving


async def tokenize(http: HTTPRequest, serving: Serving) -> Response:
    """Token ids of a prompt, or of messages in the chat template."""
    request = await serving.read(http, TokenizeRequest)
    return await serving.while_there(http, serving.text.run(_tokenized, serving, request, http.scope[CLIENT]))


def _tokenized(serving: Serving, request: TokenizeRequest, client: str) -> Response:
    if request.prompt is not None:
        serving.prompts.check_chars(request.prompt, "prompt")
        special = request.add_special_tokens is not False
        token_ids = serving.tokenizer.encode(request.prompt, add_special_tokens=special)
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


async def detokenize(http: HTTPRequest, serving: Serving) -> Response:
    """The text of tokens, special ones included."""
    request = await serving.read(http, DetokenizeRequest)
    return await serving.while_there(http, serving.text.run(_detokenized, serving, request.tokens))


def _detokenized(serving: Serving, tokens: list[int]) -> Response:
    vocab_size = serving.engine.engine.vocab_size
    highest = max(tokens, default=0)
    if highest >= vocab_size:
        raise Problem(400, f"tokens holds {highest}: the vocabulary has {vocab_size} tokens", "tokens")
    return json_response({"prompt": serving.tokenizer.decode(tokens, skip_special_tokens=False)})


async def tokenizer_info(_: HTTPRequest, serving: Serving) -> Response:
    """Special tokens, the chat template and the longest sequence, for clients that render and count by themselves."""
    info: dict[str, Any] = await serving.text.run(serving.tokenizer.info)
    return json_response(info | {"model_max_length": serving.max_model_len})
