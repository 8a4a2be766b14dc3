"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's tokenizer, for clients that count or build prompts."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.server.answers import json_response
from nanoengine.server.errors import Problem
from nanoengine.server.protocol import DetokenizeRequest, TokenizeRequest
from nanoengine.server.serving import Serving
from nanoengine.server.sse import encode


async def tokenize(http: HTTPRequest) -> Response:
    """Token ids of a prompt, or of messages in the chat template."""
    serving: Serving = http.app.state.serving
    request = await serving.read(http, TokenizeRequest)
    return json_response(await serving.text.run(_tokenized, serving, request))


def _tokenized(serving: Serving, request: TokenizeRequest) -> bytes:
    if request.messages is None:
        token_ids = serving.tokenizer.encode(
            request.prompt or "", add_special_tokens=request.add_special_tokens is not False
        )
    else:
        text = serving.chats.render(
            request.messages,
            template_kwargs=request.chat_template_kwargs,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
        token_ids = serving.chats.encode(text, add_special_tokens=bool(request.add_special_tokens))
    return encode(
        {
            "count": len(token_ids),
            "max_model_len": serving.max_model_len,
            "tokens": token_ids,
            "token_strs": serving.tokenizer.pieces(token_ids) if request.return_token_strs else None,
        }
    )


async def detokenize(http: HTTPRequest) -> Response:
    """The text of tokens, special ones included."""
    serving: Serving = http.app.state.serving
    request = await serving.read(http, DetokenizeRequest)
    return json_response(await serving.text.run(_detokenized, serving, request))


def _detokenized(serving: Serving, request: DetokenizeRequest) -> bytes:
    vocab_size = serving.engine.engine.vocab_size
    highest = max(request.tokens, default=0)
    if highest >= vocab_size:
        raise Problem(400, f"tokens holds {highest}: the vocabulary has {vocab_size} tokens", "tokens")
    return encode({"prompt": serving.tokenizer.decode(request.tokens, skip_special_tokens=False)})


async def tokenizer_info(http: HTTPRequest) -> Response:
    """What a client needs to render and count as this server does: special tokens, the chat template, the longest sequence."""
    serving: Serving = http.app.state.serving
    info: dict[str, Any] = await serving.text.run(serving.tokenizer.info)
    return json_response(encode(info | {"model_max_length": serving.max_model_len}))
