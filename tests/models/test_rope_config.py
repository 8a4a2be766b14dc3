"""Rotations: every spelling and kind is read, and what is not computed is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.errors import UnsupportedModel
from nanoengine.models.architectures import read_model_config
from nanoengine.models.model_config import RopeConfig
from tests.models.configs import QWEN3_06B, without


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 1e4},
        {"rope_parameters": None, "rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": None},
    ],
)
def test_rope_theta_is_found_in_every_spelling(rope: dict[str, Any]) -> None:
    assert read_model_config(without("rope_theta", "rope_scaling") | rope).layers[0].rope == RopeConfig(
        theta=5e5, rotary_dim=128
    )


@pytest.mark.parametrize("table", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_other_rope_types_are_refused_by_name(table: str, key: str) -> None:
    for rope_type in ("mrope", "proportional", 7, ["yarn"]):
        with pytest.raises(UnsupportedModel, match=r"rope_type is .*supported are default, linear, dynamic"):
            read_model_config(QWEN3_06B | {table: {key: rope_type, "factor": 4.0, "rope_theta": 1e6}})


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_rope_scaling_is_read_in_place_of_rope_parameters(key: str) -> None:
    """As transformers does where both are there."""
    tables = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {key: "linear", "factor": 4.0, "rope_theta": 5e5},
    }
    assert rope_of(tables) == RopeConfig(theta=5e5, rotary_dim=128, kind="linear", factor=4.0)


def rope_of(changes: dict[str, Any]) -> RopeConfig | None:
    return read_model_config(QWEN3_06B | changes).layers[0].rope


@pytest.mark.parametrize(
    ("table", "missing"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "dynamic"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}, "factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "high_freq_factor is 4.0",
        ),
        ({"rope_type": "longrope", "short_factor": [1.0] * 64}, "long_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 63, "long_factor": [1.0] * 64}, "short_factor"),
        ({"rope_type": "longrope", "short_factor": [0.0] * 64, "long_factor": [1.0] * 64}, "short_factor is 0.0"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0"),
        ({"rope_type": "linear", "factor": "4"}, "factor is '4'"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": -1}, "beta_fast is -1"),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1.5},
            "original_max_position_embeddings is 1.5",
        ),
    ],
    ids=str,
)
def test_what_a_kind_needs_and_does_not_find_is_named(table: dict[str, Any], missing: str) -> None:
    with pytest.raises(UnsupportedModel, match=missing):
        read_model_config(QWEN3_06B | {"rope_parameters": table})


@pytest.mark.parametrize("kind", ["default", "linear"])
def test_a_field_of_a_rotation_that_nobody_knows_is_refused(kind: str) -> None:
    table = {"rope_type": kind, "factor": 2.0, "mrope_section": [16, 24, 24]}
    with pytest.raises(UnsupportedModel, match=r"'mrope_section' is .* in rope_parameters"):
        read_model_config(QWEN3_06B | {"rope_parameters": table})


def test_what_was_trained_is_stated_outside_of_the_table_or_in_it_or_is_all() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    outside, inside = {"original_max_position_embeddings": 1000}, {"original_max_position_embeddings": 2000}
    for changes, trained in (
        ({"rope_scaling": yarn}, 40960),
        ({"rope_scaling": yarn | inside}, 2000),
        ({"rope_scaling": yarn | inside} | outside, 1000),
    ):
        rope = rope_of(changes)
        assert rope is not None
        assert rope.trained_positions == trained


@pytest.mark.parametrize("theta", [0, -1.0, "1e6", True, float("inf"), float("nan"), [1e6]])
def test_a_rope_theta_that_is_no_positive_number_is_refused(theta: object) -> None:
    with pytest.raises(UnsupportedModel, match="rope_theta"):
        read_model_config(QWEN3_06B | {"rope_theta": theta})


@pytest.mark.parametrize("rope", ["yarn", [1], 7])
def test_rope_parameters_that_are_no_table_are_refused(rope: object) -> None:
    with pytest.raises(UnsupportedModel, match="rope_parameters"):
        read_model_config(QWEN3_06B | {"rope_parameters": rope})


def test_a_partial_rotation_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"partial_rotary_factor is 0\.5"):
        read_model_config(QWEN3_06B | {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}})


def test_rope_parameters_per_layer_type_are_refused() -> None:
    """Read as one table they would have no rope_theta, and the default would be a wrong one."""
    tables = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    with pytest.raises(UnsupportedModel, match="rope"):
        read_model_config(without("rope_theta") | {"rope_parameters": tables})


BY_TYPE = ["Gemma3ForCausalLM", "Olmo3ForCausalLM"]
NESTED = {kind: {"rope_type": "default", "rope_theta": 3e5} for kind in ("full_attention", "sliding_attention")}


def ropes_of(architecture: str, changes: dict[str, Any]) -> set[float]:
    """The thetas of all layers of a family that has several."""
    sizes = without("rope_theta", "rope_scaling", "hidden_act", "max_window_layers", "sliding_window")
    config = read_model_config(sizes | {"architectures": [architecture]} | changes)
    return {layer.rope.theta for layer in config.layers if layer.rope is not None}


@pytest.mark.parametrize("architecture", BY_TYPE)
@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, NESTED], ids=["for all", "by type"])
def test_two_tables_where_layers_have_their_own_are_refused(architecture: str, scaling: dict[str, Any]) -> None:
    """Transformers merges them: read alone, either lacks what the other says."""
    tables = {"rope_scaling": scaling, "rope_parameters": NESTED}
    with pytest.raises(UnsupportedModel, match=r"rope_scaling is .* and rope_parameters is .*one of the two"):
        ropes_of(architecture, tables)
    for empty in (None, {}):
        assert ropes_of(architecture, tables | {"rope_scaling": empty}) == {3e5}
        assert ropes_of(architecture, {"rope_scaling": NESTED, "rope_parameters": empty}) == {3e5}


@pytest.mark.parametrize("lacking", NESTED)
def test_a_theta_beside_tables_that_lack_one_is_refused(lacking: str) -> None:
    tables = {"rope_parameters": NESTED | {lacking: {"rope_type": "default"}}}
    with pytest.raises(UnsupportedModel, match=r"rope_theta is 10000\.0: rope_parameters, .*must say of which"):
        ropes_of("Olmo3ForCausalLM", tables | {"rope_theta": 1e4})
    assert ropes_of("Olmo3ForCausalLM", tables | {"rope_theta": 5e5}) == {3e5, 5e5}
    assert ropes_of("Olmo3ForCausalLM", {"rope_parameters": NESTED, "rope_theta": 1e4}) == {3e5}
