"""The requests of OpenAI's interface as types, with the fields that vLLM has added to them.

`fields.py` says what becomes of a field that none of them has.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from nanoengine.errors import shown
from nanoengine.features.sampling.params import MAX_LOGIT_BIAS, MAX_STOP_CHARS
from nanoengine.serve.server.bodies.fields import IGNORED, OF_CHATS, OF_EMBEDDINGS, Body, with_fields
from nanoengine.serve.server.errors import APIError

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
MAX_STOP_TOKEN_IDS = 1024
Budget = Annotated[int, Meta(ge=-1, le=2**31 - 1)]

MAX_TOKEN_IDS = 1 << 20
"""The most token ids in a list: no sequence and no vocabulary has more."""

Stop = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
Stops = Stop | Annotated[list[Stop], Meta(max_length=1024)]
Prompts = str | Annotated[list[str | TokenId | list[TokenId]], Meta(max_length=MAX_TOKEN_IDS)]
Texts = str | list[str]
Messages = Annotated[list[dict[str, Any]], Meta(min_length=1)]
Table = dict[str, Any]

MAX_ID_CHARS = 128
"""The longest id that a client gives its request: every chunk of a stream repeats it."""


MAX_SALT_CHARS = 1024
"""The longest `cache_salt`: it is stored with the cached prefixes of the request."""

MAX_REQUEST_IDS = 4096
"""The most ids in one request to abort."""


class StreamOptions(Body, kw_only=True):
    """Usage in a stream: in a separate chunk at the end, or in every chunk."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False


def _check_continuing(is_continued: bool | None, is_begun: bool | None) -> None:
    if is_continued and is_begun:
        message = "continue_final_message cannot be true beside add_generation_prompt: set the latter to false"
        raise APIError(400, message, "continue_final_message")


class Named(Body, kw_only=True):
    model: str | None = None


SAMPLING = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), float),
    "top_k": int,
    "seed": Int64,
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), float),
}
"""Sampling parameters of all interfaces except Anthropic's, and their types. None: the default (models/default_sampling.py)."""


class Queued(Named, kw_only=True):
    """Fields of every request that is queued in the engine."""

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    priority: Int64 | None = 0
    request_id: Annotated[str, Meta(max_length=MAX_ID_CHARS)] | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None = None

    def name_of(self, field: str) -> str:
        """The client's name of a field of `SamplingParams`, or of "prompt", which is what is encoded."""
        return "input" if field == "prompt" else field


class Generation(with_fields(Queued, IGNORED, SAMPLING), kw_only=True):  # type: ignore[misc, call-arg]
    """Fields that both kinds of generation have."""

    # OpenAI's
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    n: int | None = 1
    stop: Stops | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: Table | None = None
    # vLLM's
    best_of: int | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    min_tokens: int | None = 0
    skip_special_tokens: bool | None = True
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)] | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = False
    return_token_ids: bool | None = False
    echo: bool | None = False
    stream_interval: Positive | None = None
    structured_outputs: Table | None = None
    # llama.cpp's
    json_schema: Table | None = None
    grammar: str | None = None

    def check(self) -> None:
        if self.stream_options not in (None, StreamOptions()) and not self.stream:
            raise APIError(400, "stream_options can only be given with stream=true", "stream_options")
        if self.stream and self.prompt_logprobs:
            raise APIError(400, "prompt_logprobs are not available with stream=true", "prompt_logprobs")
        if self.stream and self.best_of not in (None, self.n or 1):
            raise APIError(400, f"best_of is {shown(self.best_of)}: with stream it must be n", "best_of")

    def name_of(self, field: str) -> str:
        return field

    def sampling(self) -> Table:
        """Fields of `SamplingParams` that mean different things in completions and chats."""
        raise NotImplementedError


class CompletionRequest(Generation, kw_only=True):  # type: ignore[call-arg]
    """POST /v1/completions."""

    prompt: Prompts | None = None
    suffix: str | None = None
    logprobs: int | None = None
    max_tokens: int | None = 16

    def check(self) -> None:
        super().check()
        if self.suffix and self.echo:
            raise APIError(400, "echo cannot be true beside suffix: an answer is what stands between the two", "echo")

    @property
    def is_echo_only(self) -> bool:
        """Whether the answer is the prompt alone; one token is computed, and left out."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self) -> Table:
        of_prompt = self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
        max_tokens = 1 if self.is_echo_only else self.max_tokens
        return {"max_tokens": max_tokens, "logprobs": self.logprobs, "prompt_logprobs": of_prompt}


class ReasoningWish(with_fields(Body, ("summary", "generate_summary", "context", "mode")), kw_only=True):  # type: ignore[misc, call-arg]
    """OpenAI's and OpenRouter's wish for a thought."""

    effort: str | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None


class ThinkingWish(with_fields(Body, ("display", "block_binding")), kw_only=True):  # type: ignore[misc, call-arg]
    """Anthropic's wish for a thought."""

    type: Literal["enabled", "disabled", "adaptive"] | None = None
    budget_tokens: Budget | None = None


class ChatRequest(with_fields(Generation, OF_CHATS), kw_only=True):  # type: ignore[misc, call-arg]
    """POST /v1/chat/completions."""

    messages: Messages
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: list[Table] | None = None
    tool_choice: str | Table | None = None
    parallel_tool_calls: bool | None = True
    include_reasoning: bool | None = True
    # Whether and how long the model thinks, as different servers call it.
    reasoning_effort: str | None = None
    reasoning: ReasoningWish | None = None
    thinking: ThinkingWish | None = None
    enable_thinking: bool | None = None
    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: Table | None = None
    documents: list[dict[str, Any]] | None = None
    return_prompt_text: bool | None = False

    def check(self) -> None:
        super().check()
        _check_continuing(self.continue_final_message, self.add_generation_prompt)
        if self.top_logprobs and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs=true", "top_logprobs")

    def name_of(self, field: str) -> str:
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names.get(field, field)

    def sampling(self) -> Table:
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return {"max_tokens": max_tokens, "logprobs": (self.top_logprobs or 0) if self.logprobs else None}


class TranslatedRequest(ChatRequest, kw_only=True):  # type: ignore[call-arg]
    """A conversation of another interface. `names`: its names of fields; see `name_of`."""

    names: dict[str, str]

    def name_of(self, field: str) -> str:
        return self.names.get(field) or super().name_of(field)


class EmbeddingRequest(with_fields(Queued, OF_EMBEDDINGS), kw_only=True):  # type: ignore[misc, call-arg]
    """POST /v1/embeddings."""

    input: Prompts
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    use_activation: bool | None = None  # vLLM's: whether it is normalized


class TokenizeRequest(with_fields(Named, ("parse_special",)), kw_only=True):  # type: ignore[misc, call-arg]
    """POST /tokenize: of a prompt, of messages, or of llama.cpp's content."""

    content: str | None = None
    add_special: bool | None = False
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: Table | None = None
    tools: list[Table] | None = None

    def check(self) -> None:
        if [self.prompt, self.messages, self.content].count(None) != 2:
            raise APIError(400, "prompt, messages and content: give one of them", "prompt")
        _check_continuing(self.continue_final_message, self.add_generation_prompt)


class DetokenizeRequest(Named, kw_only=True):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]


class AbortRequest(Body, kw_only=True):
    """POST /abort_requests: ids as the answers have them; without the field, all of the client's."""

    request_ids: Annotated[list[str], Meta(max_length=MAX_REQUEST_IDS)] | None = None


class LoadAdapterRequest(Body, kw_only=True):
    """POST /v1/load_lora_adapter: from a folder of the server's machine."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool | None = False


class UnloadAdapterRequest(Body, kw_only=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]
    lora_int_id: int | None = None  # vLLM's clients may send it; the name is enough
