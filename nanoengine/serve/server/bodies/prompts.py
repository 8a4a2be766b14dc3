"""Prompts: texts, token ids and conversations of requests as tokens for the model, within the limits of the server."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cached_property

from nanoengine.features.tool_calls.chats import Chats
from nanoengine.features.tool_calls.prompt import Prompt
from nanoengine.models.fill_in_middle import FillTokens, fill_tokens
from nanoengine.models.tokenizer import ModelTokenizer
from nanoengine.serve.server.bodies.chat_encoder import ChatEncoder, check_turns, joined
from nanoengine.serve.server.bodies.protocol import ChatRequest, Queued, TokenizeRequest
from nanoengine.serve.server.bodies.thinking import thinking_wish
from nanoengine.serve.server.config import ServerConfig
from nanoengine.serve.server.errors import TOO_LONG, APIError, context

CHARS_OF_A_STEP = 1 << 16
"""Characters of short texts that are encoded in one step, before other clients run; a longer text is encoded alone."""


class Prompts:
    """Called in the threads for text.

    Args:
        tokenizer: of the model.
        config: of the server.
        max_model_len: tokens of the longest sequence.
    """

    def __init__(self, tokenizer: ModelTokenizer, config: ServerConfig, max_model_len: int):
        self.tokenizer, self.max_model_len, self._max_chars = tokenizer, max_model_len, config.max_text_chars
        self.chats = Chats(tokenizer)
        self.chat_encoder = ChatEncoder(tokenizer, config.token_cache_chars)
        self._longest_token = max(map(len, tokenizer.token_ids()), default=1)

    def of_chat(self, request: ChatRequest | TokenizeRequest) -> Prompt:
        """A conversation, rendered for the model. Raises as `Chats.prompt` and `check_turns`."""
        template = self.tokenizer.chat_template(bool(request.tools))
        kwargs, field = request.chat_template_kwargs or {}, "messages"
        values = {name: value for name, value in kwargs.items() if value is not None}
        if isinstance(request, ChatRequest):
            field = request.name_of("prompt")
            documents = {} if request.documents is None else {"documents": request.documents}
            values = thinking_wish(request) | documents | values
        check_turns(request.messages or (), template, field)
        return self.chats.prompt(
            [joined(message) for message in request.messages or ()],
            request.tools,
            getattr(request, "tool_choice", None),
            parallel=getattr(request, "parallel_tool_calls", None) is not False,
            template_kwargs=values,
            add_generation_prompt=bool(request.add_generation_prompt),
            continue_final_message=bool(request.continue_final_message),
        )

    @cached_property
    def fill_tokens(self) -> FillTokens:
        """The marks around a prefix and a suffix. Raises as `fill_tokens`."""
        return fill_tokens(self.tokenizer)

    def count(self, request: ChatRequest, client: str) -> int:
        """Tokens of a conversation. Raises as `of_chat` and `check_length`."""
        text = self.of_chat(request).text
        self.check_length(text, request)
        return len(self.chat_encoder.encode(text, client=client))

    def encode(self, prompts: Sequence[str | list[int]], request: Queued) -> Generator[None, None, list[list[int]]]:
        """Token ids of prompts, texts among them, step by step. Raises as `check_length` and `ModelTokenizer.encode`."""
        encoded, size = [], 0
        for prompt in prompts:
            if isinstance(prompt, str):
                self.check_length(prompt, request)
                if size and size + len(prompt) > CHARS_OF_A_STEP:
                    yield
                    size = 0
                size += len(prompt)
                prompt = self.tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens is not False)
            encoded.append(prompt)
        return encoded

    def check_length(self, text: str, request: Queued) -> None:
        """Refuse a text that is too long for the model however it is split, before it is.

        Raises:
            APIError: it is.
        """
        self.check_chars(text, "prompt")
        most = self.max_model_len * self._longest_token
        if len(text) > most and request.truncate_prompt_tokens is None:
            message = (
                f"the prompt is too long: {context(self.max_model_len)}, and it has {len(text)} characters, more than "
            )
            message += f"{most}, which are the most that so many tokens can have: shorten it"
            raise APIError(400, message, "prompt", code=TOO_LONG)

    def check_chars(self, text: str, field: str) -> None:
        """Refuse a text that would keep a thread for long; raises an APIError."""
        if len(text) > (limit := self._max_chars):
            most = f"this server splits {limit} (max_text_chars), and {context(self.max_model_len)}"
            message = f"{field} has {len(text)} characters, so the prompt is too long: {most}"
            raise APIError(400, message, field, code=TOO_LONG)
