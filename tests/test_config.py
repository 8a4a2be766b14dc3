"""Options: every value is checked, and what cannot work is refused by name. Values of other types: tests/test_any_value.py."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Any

import pytest

from nanoengine import LLM
from nanoengine.builder import read_config
from nanoengine.core.config import EngineConfig
from nanoengine.core.options import check, option
from nanoengine.errors import InvalidConfig, UnknownOption


def value_of(config: EngineConfig, name: str) -> Any:
    """An option, of the core or of a capability."""
    (owner,) = [own for own in (config, *config.options.values()) if hasattr(own, name)]
    return getattr(owner, name)


LIMITS = {
    "max_model_len": 2**24,
    "max_num_seqs": 2**20,
    "max_num_batched_tokens": 2**20,
    "long_prefill_token_threshold": 2**20,
    "block_size": 2**20,
    "num_kv_blocks": 2**31 - 2,
    "kv_cache_memory": 2**50,
    "kv_host_memory": 2**50,
    "kv_disk_bytes": 2**60,
    "num_threads": 1024,
    "num_drafts": 15,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("7B", 7),
        ("2GiB", 2 << 30),
        ("2G", 2 << 30),
        ("2gi", 2 << 30),
        ("2 GB", 2 * 10**9),
        ("1.5MiB", 3 << 19),
        ("500kb", 500_000),
        ("1TiB", 1 << 40),
        *((text, None) for text in ("", "GiB", "-1GiB", "1e9", "2PiB", "2 apples", "0x10", "²GiB", "9" * 10**6)),
    ],
)
def test_sizes_may_have_units(text: str, value: int | None) -> None:
    names = ("kv_cache_memory", "kv_host_memory", "kv_disk_bytes")
    if value is not None:
        config = read_config("demo", dict.fromkeys(names, text))
        assert [value_of(config, name) for name in names] == [value] * 3
        return
    for name in names:
        with pytest.raises(InvalidConfig, match=f"{name} is .*: it must be a number of bytes") as error:
            read_config("demo", {name: text})
        assert len(str(error.value)) < 400


REFUSED: dict[str, list[Any]] = {
    "dtype": ["float64", "int8"],
    "kv_cache_dtype": ["int4"],
    "preemption_mode": ["swop"],
    "kernels": ["numpy", "Native"],
    "gpu_memory_utilization": [0.0, 1.1, -0.5, float("nan")],
    "scheduling_policy": ["fcfs"],
    "speculation": ["eagle", "Ngram", "", "model:"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_a_value_that_cannot_work_is_refused_with_field_and_value(name: str, value: object) -> None:
    with pytest.raises(InvalidConfig) as raised:
        read_config("demo", {name: value})
    assert name in str(raised.value)
    assert str(value) in str(raised.value)


@pytest.mark.parametrize(("name", "limit"), LIMITS.items(), ids=LIMITS)
def test_counts_are_limited_to_what_the_layers_below_can_hold(name: str, limit: int) -> None:
    read_config("demo", {name: limit})
    for value in (limit + 1, 0, -1):
        with pytest.raises(InvalidConfig, match=f"{name} is {value}: it must be an integer from 1 to {limit}"):
            read_config("demo", {name: value})
    with pytest.raises(InvalidConfig, match=f"{name} is a number of 33220 bits"):
        read_config("demo", {name: 10**10_000})


@pytest.mark.parametrize("seed", [2**64, 2**70, -(2**63) - 1, 10**10_000], ids=lambda seed: f"{seed.bit_length()} bits")
def test_a_seed_has_64_bits_like_that_of_a_request(seed: int) -> None:
    with pytest.raises(InvalidConfig, match=r"seed is .* from -9223372036854775808 to 18446744073709551615"):
        read_config("demo", {"seed": seed})


@pytest.mark.parametrize(
    ("speculation", "model"),
    [(None, None), ("ngram", None), ("model:demo", "demo"), ("model:model:x", "model:x")],
)
def test_the_model_that_guesses_is_named_behind_a_colon(speculation: str | None, model: str | None) -> None:
    assert value_of(read_config("demo", {"speculation": speculation}), "draft_model") == model


def test_two_sizes_of_the_pool_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="num_kv_blocks and kv_cache_memory"):
        read_config("demo", {"num_kv_blocks": 4, "kv_cache_memory": 1 << 20})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_num_sequences", "max_num_seqs"),
        ("max_model_length", "max_model_len"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("num_gpu_blocks", "num_kv_blocks"),
        ("enable_prefix_cache", "enable_prefix_caching"),
    ],
)
def test_an_unknown_option_is_refused_and_the_nearest_is_suggested(name: str, nearest: str) -> None:
    with pytest.raises(UnknownOption, match=f"'{name}'; did you mean '{nearest}'"):
        LLM("demo", **{name: 4})


def test_a_config_does_not_change() -> None:
    with pytest.raises(AttributeError):
        read_config("demo", {}).block_size = 4  # type: ignore[misc]


def test_rules_hold_whether_annotations_are_text_or_types() -> None:
    for count, name in (("int", "str | None"), (int, str | None)):
        kind = make_dataclass(
            "Options", [("count", count, option(3, high=5)), ("name", name, option(None, choices="ab"))]
        )
        check(kind())
        check(kind(5, "a"))
        for values, message in (
            ((6,), "count is 6: .* from 1 to 5"),
            ((1, "c"), "name is 'c': .* one of a, b, or None"),
        ):
            with pytest.raises(InvalidConfig, match=message):
                check(kind(*values))
