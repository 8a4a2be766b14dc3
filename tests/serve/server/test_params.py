"""A request's fields to the engine's."""

from __future__ import annotations

import msgspec
import pytest

from nanoengine.errors import InvalidSamplingParams, NanoEngineError
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.serve.server.bodies.params import sampling_params, truncate
from nanoengine.serve.server.bodies.protocol import CompletionRequest, TranslatedRequest
from nanoengine.serve.server.bodies.structured import named_as_sent
from nanoengine.serve.server.errors import APIError, api_error_of


def request(**fields: object) -> CompletionRequest:
    return msgspec.convert({"prompt": "a", **fields}, CompletionRequest)


def params(defaults: dict[str, float] | None = None, **fields: object) -> SamplingParams:
    return sampling_params(request(**fields), defaults or {}, max_model_len=100, max_n=4)


def test_nothing_but_the_defaults() -> None:
    assert params() == SamplingParams(max_tokens=16)


def test_what_the_makers_of_a_model_advise_gives_way_to_what_a_client_says() -> None:
    advised = {"temperature": 0.5, "top_k": 7, "max_tokens": 3, "logprobs": 2}
    assert params(advised, temperature=0.25) == SamplingParams(temperature=0.25, top_k=7, max_tokens=16)


def test_biases_have_keys_of_text_and_are_cut_to_their_range() -> None:
    assert params(logit_bias={"5": 200, "2": -1.5}).logit_bias == ((2, -1.5), (5, 100.0))
    with pytest.raises(APIError, match=r"'x'.*'-1'") as caught:
        params(logit_bias={"x": 1, "3": 1, "-1": 2})
    assert caught.value.param == "logit_bias"


def test_a_seed_of_minus_one_is_none() -> None:
    assert params(seed=-1).seed is None
    assert params(seed=3).seed == 3


def test_errors_call_fields_as_the_client_does() -> None:
    messages = [{"role": "user", "content": "a"}]
    for field, fields in (
        ("top_logprobs", {"logprobs": True, "top_logprobs": 50}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("max_tokens", {"max_tokens": 200}),
        ("num", {"max_tokens": 200, "names": {"max_tokens": "num"}}),
        ("stop_token_ids", {"stop_token_ids": [-1], "names": {"stop": "stop_sequences"}}),
    ):
        chat = TranslatedRequest(**{"messages": messages, "names": {}} | fields)  # type: ignore[arg-type]
        with pytest.raises(NanoEngineError, match=f"^{field} ") as caught, named_as_sent(chat):
            sampling_params(chat, {}, max_model_len=100, max_n=4)
        assert api_error_of(caught.value).param == field
    with pytest.raises(InvalidSamplingParams, match="top_p"):
        params(top_p=2.0)


def test_a_prompt_is_cut_at_the_side_that_is_asked_for() -> None:
    ids = list(range(10))
    assert truncate(ids, request(), 100) == ids
    assert truncate(ids, request(truncate_prompt_tokens=3), 100) == [7, 8, 9]
    assert truncate(ids, request(truncate_prompt_tokens=3, truncation_side="right"), 100) == [0, 1, 2]
    assert truncate(ids, request(truncate_prompt_tokens=50), 100) == ids
    assert truncate(ids, request(truncate_prompt_tokens=0), 100) == []
    assert truncate(ids, request(truncate_prompt_tokens=-1), 5) == [6, 7, 8, 9]
    with pytest.raises(APIError, match="truncate_prompt_tokens is 101"):
        truncate(ids, request(truncate_prompt_tokens=101), 100)
