"""What clients send: the requests of OpenAI's interface, with the fields that vLLM has added to them.

A field is taken, or tolerated because it can change nothing here (`IGNORED`), or refused by its name (`REFUSED`) unless it has a
value that asks for nothing. A field that is none of these is refused as well: an option that is silently dropped gives wrong
answers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from nanoengine.sampling.bad_word_tokens import MAX_BAD_WORDS
from nanoengine.sampling.params import MAX_LOGIT_BIAS, MAX_STOP_CHARS
from nanoengine.server.errors import Problem

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
MAX_STOP_TOKEN_IDS = 1024

MAX_TOKEN_IDS = 1 << 20
"""In a list of them: no sequence and no vocabulary has more."""

Stop = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
Messages = Annotated[list[dict[str, Any]], Meta(min_length=1)]
Table = dict[str, Any]

MAX_ID_CHARS = 128
"""Of the name that a client gives its request: every chunk of a stream repeats it."""

IGNORED = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "session_id",
    "spaces_between_special_tokens",
    "verbosity",
    "parallel_tool_calls",
    "include_reasoning",
    "mm_payload",
    "return_mm_kwargs",
    "return_token_offsets",
)
"""Fields that can change nothing here: notes of the client's, hints about other servers' caches, and what concerns images or
calls of tools, of which there are none."""

REFUSED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_embeds": (),
    "logprob_token_ids": ([],),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "watermarking": (False,),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "logits_processors": ([],),
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none",),
}
"""Fields that are not supported, with the values beside null that ask for nothing."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream has beside the answer: usage in a chunk of its own at the end, or in every chunk."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False


def _refuse(request: msgspec.Struct) -> None:
    """Refuse what would be dropped otherwise."""
    for name, neutral in REFUSED.items():
        value = getattr(request, name, None)
        if value is not None and value not in neutral:
            raise Problem(400, f"{name} is not supported: leave it out", name)


class _Named(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None


class Generation(_Named, kw_only=True):
    """Fields that both kinds of generation have. None: what generation_config.json advises, or the neutral value."""

    # OpenAI's
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    n: int | None = 1
    presence_penalty: float | None = None
    seed: Int64 | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=1024)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    response_format: Table | None = None
    # vLLM's
    best_of: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    min_tokens: int | None = 0
    skip_special_tokens: bool | None = True
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)] | None = None
    prompt_logprobs: int | None = None
    bad_words: Annotated[list[str], Meta(max_length=MAX_BAD_WORDS)] | None = None
    add_special_tokens: bool | None = None
    priority: Int64 = 0
    request_id: Annotated[str, Meta(max_length=MAX_ID_CHARS)] | None = None
    return_tokens_as_token_ids: bool | None = False
    return_token_ids: bool | None = False
    cache_salt: str | None = None
    stream_interval: Positive | None = None
    # Tolerated
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    session_id: Any = None
    spaces_between_special_tokens: Any = None
    mm_payload: Any = None
    return_mm_kwargs: Any = None
    return_token_offsets: Any = None
    # Refused
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    logprob_token_ids: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    watermarking: Any = None
    return_weight_versions: Any = None
    routed_experts_prompt_start: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    logits_processors: Any = None

    def check(self) -> None:
        """Refuse what would be dropped otherwise."""
        _refuse(self)
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise Problem(
                400, "response_format is not supported but for {'type': 'text'}: leave it out", "response_format"
            )
        if self.stream_options is not None and not self.stream:
            raise Problem(400, "stream_options can only be given with stream=true", "stream_options")
        if self.stream and self.prompt_logprobs:
            raise Problem(400, "prompt_logprobs are not available with stream=true", "prompt_logprobs")
        if self.stream and self.best_of not in (None, self.n or 1):
            raise Problem(400, f"best_of is {self.best_of}: with stream it must be n", "best_of")


class CompletionRequest(Generation, kw_only=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(max_length=MAX_TOKEN_IDS)] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = 16
    suffix: Any = None
    prompt_embeds: Any = None


class ChatRequest(Generation, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: list[Table] | None = None
    tool_choice: str | Table | None = None
    reasoning_effort: str | None = None
    echo: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Table | None = None
    documents: list[dict[str, Any]] | None = None
    return_prompt_text: bool | None = False
    verbosity: Any = None
    parallel_tool_calls: Any = None
    include_reasoning: Any = None
    chat_template: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None

    def check(self) -> None:
        super().check()
        if self.continue_final_message and self.add_generation_prompt:
            raise Problem(
                400,
                "continue_final_message cannot be true beside add_generation_prompt: set the latter to false",
                "continue_final_message",
            )
        if self.top_logprobs and not self.logprobs:
            raise Problem(400, "top_logprobs needs logprobs=true", "top_logprobs")
        if self.tool_choice not in (None, "none", "auto"):
            raise Problem(
                400,
                "tool_choice may be 'none' or 'auto': tools are told to the template, and nothing forces a call",
                "tool_choice",
            )


class TokenizeRequest(_Named, kw_only=True):
    """POST /tokenize: of a prompt, or of messages."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Table | None = None
    tools: list[Table] | None = None
    chat_template: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise Problem(400, "prompt and messages: give one of them", "prompt")
        _refuse(self)
        if self.continue_final_message and self.add_generation_prompt:
            raise Problem(
                400,
                "continue_final_message cannot be true beside add_generation_prompt: set the latter to false",
                "continue_final_message",
            )


class DetokenizeRequest(_Named, kw_only=True):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]

    def check(self) -> None:
        pass


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /abort_requests: ids as the answers have them; none means all."""

    request_ids: list[str] | None = None

    def check(self) -> None:
        pass
