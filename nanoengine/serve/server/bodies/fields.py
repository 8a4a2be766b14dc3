"""Ignored and unknown fields of requests. One rule holds for every interface:

A field of a request type is read, or it is ignored because it can change nothing here (`IGNORED` and its like). An unknown field
is dropped if its value is neutral, so that newer clients are served, and refused by its name otherwise: an option that is
silently dropped gives wrong answers. Ollama's interface alone ignores names that Ollama does not know, as Ollama does.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, get_args

import msgspec

from nanoengine.errors import did_you_mean, shown
from nanoengine.serve.server.errors import APIError

logger = logging.getLogger("nanoengine")

IGNORED = (
    *("user", "store", "metadata", "service_tier", "safety_identifier", "session_id"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "spaces_between_special_tokens"),
    *("mm_payload", "return_mm_kwargs", "return_token_offsets"),
    *("cache_prompt", "id_slot", "keep_alive", "samplers"),
)
"""Fields that can change nothing here: notes of the client's, hints about other servers' caches, the order of filters, which is
fixed, and what concerns images, of which there are none."""

OF_CHATS = ("verbosity",)
OF_EMBEDDINGS = ("user", "metadata", "keep_alive")

IGNORED_MESSAGES = (
    *("metadata", "service_tier", "cache_control", "context_management", "inference_geo", "speed", "betas"),
    *("billing_policy", "fallback_credit_token", "fallbacks", "user_profile_id", "workspace_id"),
)
"""Caches, prices, regions and other models of another server; context_management asks one to forget parts of long conversations
by itself."""

IGNORED_RESPONSES = (
    *("client_metadata", "metadata", "user", "safety_identifier", "service_tier", "stream_options", "store", "image"),
    *("context_management", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "max_tool_calls"),
    *("access_programs", "background_options"),
)
"""max_tool_calls is of tools that another server calls by itself. No response is stored, and `store` is false in each."""

IGNORED_OLLAMA = ("truncate", "shift")

UNAVAILABLE_OLLAMA = ("images", "template", "context", "logprobs", "top_logprobs", "mirostat", "typical_p", "tfs_z")
"""Fields and options that Ollama has, and this server has not. Any other field is ignored by both."""

MAX_IGNORED_NAMES = 256
"""The most names of ignored fields in the log."""

IGNORED_OPTIONS = (
    *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_gqa", "numa"),
    *("low_vram", "f16_kv", "vocab_only", "use_mmap", "use_mlock", "logits_all", "embedding_only", "draft_num_predict"),
    *("rope_frequency_base", "rope_frequency_scale", "mirostat_eta", "mirostat_tau", "penalize_newline"),
)
"""Options of Ollama for the layout of a model in memory; the length of the context is the server's."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("use_beam_search", "early_stopping", "watermarking", "return_weight_versions", "background"), (False,)
    ),
    **dict.fromkeys(("logprobs", "return_progress", "with_pieces"), (False,)),
    **dict.fromkeys(("length_penalty", "typical_p", "typ_p", "tfs_z", "dynatemp_exponent", "n_cmpl"), (1,)),
    **dict.fromkeys(("routed_experts_prompt_start", "top_logprobs", "n_probs", "mirostat"), (0,)),
    **dict.fromkeys(("dynatemp_range", "xtc_probability", "dry_multiplier"), (0,)),
    "modalities": (["text"],),
    "function_call": ("none",),
    "truncation": ("disabled",),
    "chat_template": (),
}
"""Fields of abilities that are not here, with the neutral values of each, beside empty ones."""

NEUTRAL_ANYWHERE = ("auto", "default")
"""Neutral values of any unknown field."""

INSTEAD: dict[str, tuple[str, ...]] = {
    **{f"guided_{kind}": (f'structured_outputs {{"{kind}": ...}}',) for kind in ("json", "regex", "choice", "grammar")},
    "functions": ("tools",),
    "function_call": ("tool_choice",),
    "enable_thinking": ("thinking", "think", "reasoning"),
    "do_sample": ("temperature (0: the likeliest token)",),
    **dict.fromkeys(("max_tokens", "n_predict", "num_predict", "max_length"), ("max_tokens", "max_output_tokens")),
    "stop_sequences": ("stop",),
    "stop": ("stop_sequences",),
    "input": ("messages", "prompt"),
    "messages": ("input",),
    "previous_response_id": ("input with all items of the conversation: no responses are kept here",),
    "system": ("messages (role system)", "instructions"),
    "response_format": ("text.format", "format", "output_config.format"),
}
"""Alternatives for names of older clients and of other interfaces; the first that is a field of the request is named."""


MAX_NEUTRAL_BYTES = 32
"""The longest JSON of a neutral value."""

EMPTY: tuple[Any, ...] = (None, [], {})

EMPTY_IS_A_VALUE = ("allowed_token_ids", "request_ids", "json_schema", "guided_json", "schema")
"""Fields in which an empty value has a meaning: no token, no request, any JSON."""


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request. A field that is null or empty means the same as no field.

    Attributes:
        unavailable: fields that are refused where any other unknown one is ignored; None: all are refused.
    """

    unavailable: ClassVar[tuple[str, ...] | None] = None

    def __post_init__(self) -> None:
        for name, default in _defaults(type(self)):
            value = getattr(self, name)
            if value is not default and (not value or isinstance(value, msgspec.Raw)) and _is_empty(name, value):
                setattr(self, name, default)

    def check(self) -> None:
        """Refuse combinations of fields of which one would have no effect; raises APIError."""


@cache
def _defaults(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """The optional fields of a type, with their defaults."""
    return [
        (field.name, field.default) for field in msgspec.structs.fields(kind) if field.default is not msgspec.NODEFAULT
    ]


def _is_empty(name: str, value: Any) -> bool:
    empty = EMPTY[:1] if name in EMPTY_IS_A_VALUE else EMPTY
    return _is_neutral(bytes(value), empty) if isinstance(value, msgspec.Raw) else value in empty


def with_fields(
    base: type[msgspec.Struct], ignored: Iterable[str], optional: Mapping[str, Any] = MappingProxyType({})
) -> type[msgspec.Struct]:
    """A request that has more fields.

    Args:
        base: the request.
        ignored: fields with whatever values, which are not built: nobody reads them.
        optional: the types of other fields, which may be left out: they are None then.
    """
    added = dict.fromkeys(ignored, msgspec.Raw) | {name: kind | None for name, kind in optional.items()}
    return msgspec.defstruct(base.__name__, [(*field, None) for field in added.items()], bases=(base,), kw_only=True)


class Ignored:
    """Names of fields that were ignored. The log has each of them once."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def note(self, name: str) -> None:
        """Write a line, unless there was one. At most 80 characters of a name are in it, and no line end."""
        name = shown(name)
        if name not in self._names and len(self._names) < MAX_IGNORED_NAMES:
            self._names.add(name)
            logger.warning("the field %s of a request is ignored: no endpoint of Ollama's interface has it", name)


def without_unknown(body: bytes, kind: type[Body], ignored: Ignored, prefix: str = "") -> bytes:
    """The JSON of a request without its unknown fields, if their values are neutral or the interface ignores them.

    Raises:
        APIError: the value of one is not neutral.
        msgspec.DecodeError: it is no table.
    """
    known, fields = _tables(kind), {}
    for name, raw in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
        if name not in known:
            if kind.unavailable is None or name in kind.unavailable:
                check_unknown(name, bytes(raw), known, prefix)
            else:
                ignored.note(f"{prefix}{name}")
        elif (inner := known[name]) is not None and bytes(raw).startswith(b"{"):
            fields[name] = msgspec.Raw(without_unknown(bytes(raw), inner, ignored, f"{prefix}{name}."))
        else:
            fields[name] = raw
    return msgspec.json.encode(fields)


def check_unknown(name: str, raw: bytes, known: Mapping[str, type[Body] | None], prefix: str) -> None:
    """Refuse an unknown field unless its value is neutral.

    Args:
        name, raw: of it, and its value as JSON.
        known: fields that are, and the kinds of those that are tables.
        prefix: before the name in messages.

    Raises:
        APIError: its value is not neutral; the message names an alternative, where there is one.
    """
    empty = EMPTY[:1] if name in EMPTY_IS_A_VALUE else (*EMPTY, "")
    if _is_neutral(raw, (*empty, *NEUTRAL.get(name, NEUTRAL_ANYWHERE))):
        return
    ways = [other for other in INSTEAD.get(name, ()) if re.split(r"\W", other)[0] in known]
    ways += [f"{field}.{name}" for field, inner in known.items() if inner and name in _tables(inner)]
    near = "" if name in NEUTRAL else did_you_mean(name, known)
    way = f"give {ways[0]}" if ways else f"leave it out{near}"
    where = f"{prefix}{name[:80]}"
    raise APIError(400, f"{where or repr(where)} is not supported: {way}", where.partition(".")[0])


@cache
def _tables(kind: type[msgspec.Struct]) -> dict[str, type[Body] | None]:
    """The fields of a request, and the kinds of those that are tables with listed fields."""
    kind_of: dict[str, type[Body] | None] = {}
    for field in msgspec.structs.fields(kind):
        kinds = (
            part for part in (field.type, *get_args(field.type)) if isinstance(part, type) and issubclass(part, Body)
        )
        kind_of[field.encode_name] = next(kinds, None)
    return kind_of


def _is_neutral(raw: bytes, neutral: tuple[Any, ...]) -> bool:
    try:
        return len(raw) <= MAX_NEUTRAL_BYTES and msgspec.json.decode(raw) in neutral
    except (msgspec.DecodeError, UnicodeDecodeError):  # nobody has looked at these values before
        return False
