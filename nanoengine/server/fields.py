"""Fields of requests that are not taken: those that can change nothing here are ignored, those that would are refused by name.

Each request lists its own, by the names here; what is in no list is unknown, and refused as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import msgspec

from nanoengine.server.errors import Problem

IGNORED = (
    *("user", "store", "metadata", "service_tier", "safety_identifier", "session_id", "verbosity"),
    *("prompt_cache_key", "prompt_cache_retention", "spaces_between_special_tokens"),
    *("mm_payload", "return_mm_kwargs", "return_token_offsets"),
    *("cache_prompt", "id_slot", "keep_alive"),
)
"""Fields that can change nothing here: notes of the client's, hints about other servers' caches, and what concerns images,
of which there are none."""

REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("prompt_embeds", "thinking_token_budget", "repetition_detection", "chat_template"), ()),
    **dict.fromkeys(("audio", "prediction", "web_search_options"), ()),
    **dict.fromkeys(("use_beam_search", "early_stopping", "watermarking", "return_weight_versions"), (False,)),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "vllm_xargs"), ()),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs"), ()),
    **dict.fromkeys(("logprob_token_ids", "logits_processors", "functions"), ()),
    "length_penalty": (1, 1.0),
    "routed_experts_prompt_start": (0,),
    "modalities": (["text"],),
    "function_call": ("none",),
}
"""Fields that are not supported, with the values that ask for nothing, beside those that are empty."""

OF_TEMPLATES = ("chat_template", "media_io_kwargs", "mm_processor_kwargs")
OF_COMPLETIONS = ("prompt_embeds",)
OF_CHATS = (
    *OF_TEMPLATES,
    "verbosity",
    *("audio", "modalities", "prediction", "web_search_options", "functions", "function_call"),
)
OF_BOTH = tuple(name for name in (*IGNORED, *REFUSED) if name not in (*OF_COMPLETIONS, *OF_CHATS))
"""Which of OpenAI's requests have which of these fields; those of templates are of /tokenize, too."""

# ---- /v1/embeddings, /score and /rerank

OF_EMBEDDINGS = ("user", "metadata", "keep_alive")
REFUSED_SCORES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("max_tokens_per_doc", "max_tokens_per_query"), (0,)),
    **dict.fromkeys(("instruction", "chat_template_kwargs"), ()),
}
"""They are of models that read both texts at once."""

# ---- /v1/messages

IGNORED_MESSAGES = (
    "metadata",
    "service_tier",
    "cache_control",
    "context_management",
    "inference_geo",
    "speed",
    "betas",
)
"""Caches, prices and places of another server; context_management asks one to forget parts of long conversations by itself."""

REFUSED_MESSAGES: dict[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ()}

# ---- /v1/responses

IGNORED_RESPONSES = (
    *(
        "client_metadata",
        "metadata",
        "user",
        "safety_identifier",
        "service_tier",
        "stream_options",
        "context_management",
    ),
    *("prompt_cache_key", "prompt_cache_retention", "max_tool_calls"),
)
"""max_tool_calls is of tools that another server calls by itself."""

REFUSED_RESPONSES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("prompt", "conversation"), ()),
    "background": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}

# ---- Ollama's /api

IGNORED_OLLAMA = ("keep_alive", "truncate", "shift")
REFUSED_OLLAMA: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("context", "images"), ()),
    "template": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
}

IGNORED_OPTIONS = (
    *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_gqa", "numa"),
    *("low_vram", "f16_kv", "vocab_only", "use_mmap", "use_mlock", "logits_all", "embedding_only", "draft_num_predict"),
    *(
        "rope_frequency_base",
        "rope_frequency_scale",
        "mirostat_eta",
        "mirostat_tau",
        "penalize_newline",
        "repeat_last_n",
    ),
)
"""How Ollama lays a model out in memory; the length of the context is the server's. A repetition penalty is of the whole text."""

REFUSED_OPTIONS: dict[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "tfs_z": (1, 1.0),
    "typical_p": (1, 1.0),
}


MAX_NEUTRAL_BYTES = 32
"""As JSON, no value that asks for nothing is longer."""

EMPTY: tuple[Any, ...] = (None, [], {})

SAID_BY_EMPTY = ("allowed_token_ids", "request_ids", "json_schema", "guided_json")
"""Where an empty value says something: no token, no request, any JSON."""


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a client sends. A field that is null or empty means what it means to leave the field out."""

    def __post_init__(self) -> None:
        for name, default in _defaults(type(self)):
            value = getattr(self, name)
            if value is not default and (not value or isinstance(value, msgspec.Raw)) and _is_empty(name, value):
                setattr(self, name, default)


@cache
def _defaults(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """Of the fields that may be left out."""
    return [(own.name, own.default) for own in msgspec.structs.fields(kind) if own.default is not msgspec.NODEFAULT]


def _is_empty(name: str, value: Any) -> bool:
    empty = EMPTY[:1] if name in SAID_BY_EMPTY else EMPTY
    return _asks_for_nothing(bytes(value), empty) if isinstance(value, msgspec.Raw) else value in empty


def with_fields(base: type[msgspec.Struct], names: Iterable[str]) -> type[msgspec.Struct]:
    """A request that has these fields too, with whatever values, which are not built: nobody reads them but `refuse`."""
    return msgspec.defstruct(base.__name__, [(name, msgspec.Raw, None) for name in names], bases=(base,), kw_only=True)


def refuse(request: msgspec.Struct, refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse what would be dropped otherwise."""
    for name, neutral in refused.items():
        raw = getattr(request, name, None)
        if raw is not None and not _asks_for_nothing(bytes(raw), neutral):
            raise Problem(400, f"{name} is not supported: leave it out", name)


def _asks_for_nothing(raw: bytes, neutral: tuple[Any, ...]) -> bool:
    try:
        return len(raw) <= MAX_NEUTRAL_BYTES and msgspec.json.decode(raw) in neutral
    except (msgspec.DecodeError, UnicodeDecodeError):  # nobody has looked at these values before
        return False
