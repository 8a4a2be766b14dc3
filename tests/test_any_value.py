"""Any value, in any place: it is taken as what the field says it is, or refused with an error of ours that names the field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.builder import option_types, read_config
from nanoengine.core.config import EngineConfig
from nanoengine.features.beam_search.params import BeamSearchParams
from nanoengine.features.pooling.params import PoolingParams
from nanoengine.serve.server.config import ServerConfig
from tests.outside import VALUES as OF_JSON
from tests.outside import complaint

VALUES: list[Any] = [
    *OF_JSON,
    *(1j, b"", b"x", (), {1: []}, {"x"}, object(), print, int, Exception("x"), range(3), iter([1])),
    *(np.int64(3), np.float32(0.5), np.bool_(True), np.str_("x"), np.array(1), np.array("x"), np.array([1, 2])),
    *(np.array([[1.5]]), torch.tensor(1), torch.tensor(0.5), torch.tensor([1, 2])),
]

CLASSES: dict[type, Callable[..., Any]] = {
    SamplingParams: SamplingParams,
    PoolingParams: PoolingParams,
    BeamSearchParams: lambda **values: BeamSearchParams(**{"beam_width": 2} | values),
    EngineConfig: lambda **options: read_config("demo", options),
    **{kind: lambda **options: read_config("demo", options) for kind in option_types()},
    ServerConfig: ServerConfig,
}


PLAIN = {int, float, bool, str, type(None)}
"""Fields of other types say more of what they take: tests/features/*/test_params.py."""


def _stored(made: Any, kind: type, field: Field[Any]) -> None:
    """Raises if a field holds what it says it cannot hold."""
    value = getattr(made if isinstance(made, kind) else made.of(kind), field.name)
    hint = get_type_hints(kind)[field.name]
    types = set(get_args(hint)) or {hint}
    if types <= PLAIN and type(value) not in types and not (type(value) is int and float in types):
        raise TypeError(f"{value!r} is none of {types}")
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and not isinstance(value, str):
        raise TypeError(f"a {type(value)} is kept")


def _wrong(attempts: dict[str, Callable[[], Any]]) -> list[str]:
    """What ended otherwise than well or with an error of ours, which names the field in front of a dot."""
    complaints = {name: complaint(attempt, name.rpartition(".")[0]) for name, attempt in attempts.items()}
    return [f"{name}: {text}" for name, text in complaints.items() if text]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_any_value_of_a_field_is_taken_or_named(kind: type) -> None:
    make, own = CLASSES[kind], [own for own in fields(kind) if own.init and own.name not in ("model", "options")]
    attempts = {
        f"{field.name}.{number}": lambda field=field, value=value: _stored(make(**{field.name: value}), kind, field)
        for field in own
        for number, value in enumerate(VALUES)
    }
    assert attempts or not own
    assert _wrong(attempts) == []


def test_any_prompt_conversation_or_argument_is_taken_or_named() -> None:
    one = SamplingParams(max_tokens=1)
    said = [{"role": "user", "content": "a"}]
    with LLM("demo", device="cpu", num_kv_blocks=300, max_model_len=512) as llm:
        calls: dict[str, Callable[[Any], Any]] = {
            "generate": lambda value: llm.generate(value, one, use_tqdm=False),
            "generate a list": lambda value: llm.generate([value], one, use_tqdm=False),
            "generate tokens": lambda value: llm.generate([[1, value]], one, use_tqdm=False),
            "generate params": lambda value: llm.generate(["a"], value, use_tqdm=False) if value is not None else None,
            "generate salt": lambda value: llm.generate(["a"], one, use_tqdm=False, cache_salt=value),
            "stream": lambda value: next(llm.stream(value, one)),
            "stream params": lambda value: next(llm.stream("a", value)),
            "chat": lambda value: llm.chat(value, one, use_tqdm=False),
            "chat a list": lambda value: llm.chat([value], one, use_tqdm=False),
            "chat role": lambda value: llm.chat([{"role": value, "content": "a"}], one, use_tqdm=False),
            "chat content": lambda value: llm.chat([{"role": "user", "content": value}], one, use_tqdm=False),
            "chat tools": lambda value: llm.chat(said, one, use_tqdm=False, tools=value),
            "chat kwargs": lambda value: llm.chat(said, one, use_tqdm=False, chat_template_kwargs=value),
            "chat choice": lambda value: llm.chat(said, one, use_tqdm=False, tool_choice=value),
            "embed": lambda value: llm.embed(value, use_tqdm=False),
            "embed params": lambda value: llm.embed(["a"], value, use_tqdm=False),
        }
        attempts = {
            f"{name} {number}": lambda call=call, value=value: call(value)
            for name, call in calls.items()
            for number, value in enumerate(VALUES)
        }
        assert _wrong(attempts) == []
        assert llm.generate(["a"], one, use_tqdm=False)[0].outputs[0].token_ids
