"""Rotations: every spelling and kind is read, and what is not computed is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM
from nanoengine.core.errors import InvalidConfig
from nanoengine.errors import UnsupportedModel
from nanoengine.models.architectures import read_model_config
from nanoengine.models.model_config import RopeConfig
from nanoengine.models.options import ModelOptions
from tests.models.configs import QWEN3_06B, without
from tests.support import forced_logits, reference_logits, reference_model, tiny_checkpoint

NEITHER = without("rope_theta", "rope_scaling")
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0] * 64}
ONE_TABLE = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}


def rope_of(changes: dict[str, Any], base: dict[str, Any] = QWEN3_06B) -> RopeConfig:
    rope = read_model_config(base | changes).layers[0].rope
    assert rope is not None
    return rope


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_scaling": PLAIN},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": PLAIN, "rope_theta": 1e4},
        {"rope_parameters": None, "rope_theta": 5e5},
        {"rope_parameters": PLAIN | {"partial_rotary_factor": 1.0}},
        {"rope_parameters": PLAIN, "rope_scaling": None},
    ],
)
def test_rope_theta_is_found_in_every_spelling(rope: dict[str, Any]) -> None:
    assert rope_of(rope, NEITHER) == RopeConfig(theta=5e5, rotary_dim=128)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_rope_scaling_is_read_in_place_of_rope_parameters(key: str) -> None:
    """As transformers does where both are there."""
    scaling = {key: "linear", "factor": 4.0, "rope_theta": 5e5}
    found = rope_of({"rope_parameters": PLAIN | {"rope_theta": 1e6}, "rope_scaling": scaling})
    assert found == RopeConfig(theta=5e5, rotary_dim=128, kind="linear", factor=4.0)


NEEDED = [(LINEAR, "factor"), (LINEAR | {"rope_type": "dynamic"}, "factor"), (LONG, "long_factor")]
NEEDED += [(LLAMA3, name) for name in ("factor", "low_freq_factor", "high_freq_factor")]
KINDS = r"rope_type is .*supported are default, linear, dynamic"
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({table: {key: kind, "factor": 4.0, "rope_theta": 1e6}}, KINDS)
        for table in ("rope_parameters", "rope_scaling")
        for key in ("rope_type", "type")
        for kind in ("mrope", 7, ["yarn"])
    ),
    *(({"rope_parameters": {key: table[key] for key in table if key != name}}, name) for table, name in NEEDED),
    *(
        ({"rope_parameters": table}, message)
        for table, message in (
            (LLAMA3 | {"low_freq_factor": 4.5}, "high_freq_factor is 4.0"),
            (LONG | {"short_factor": [1.0] * 63}, "short_factor"),
            (LONG | {"short_factor": [0.0] * 64}, "short_factor is 0.0"),
            (LINEAR | {"factor": 0}, "factor is 0"),
            (LINEAR | {"factor": "4"}, "factor is '4'"),
            (YARN | {"beta_fast": -1}, "beta_fast is -1"),
            (YARN | {"original_max_position_embeddings": 1.5}, "original_max_position_embeddings is 1.5"),
            (PLAIN | {"mrope_section": [16, 24, 24]}, r"'mrope_section' is .* in rope_parameters"),
            (LINEAR | {"mrope_section": [16, 24, 24]}, r"'mrope_section' is .* in rope_parameters"),
            ({"rope_theta": 1e6, "partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5"),
            *((table, "rope_parameters") for table in ("yarn", [1], 7)),
        )
    ),
    *(
        ({"rope_theta": theta}, "rope_theta")
        for theta in (0, -1.0, "1e6", True, float("inf"), float("nan"), [1e6], 10**400)
    ),
]


def test_what_is_not_computed_or_not_said_is_refused_by_name() -> None:
    for changes, message in REFUSED:
        with pytest.raises(UnsupportedModel, match=message):
            read_model_config(QWEN3_06B | changes)
    # Read as one table they would have no rope_theta, and the default would be a wrong one.
    with pytest.raises(UnsupportedModel, match="rope"):
        read_model_config(without("rope_theta") | {"rope_parameters": ONE_TABLE})


def test_what_was_trained_is_stated_outside_of_the_table_or_in_it_or_is_all() -> None:
    outside, inside = {"original_max_position_embeddings": 1000}, {"original_max_position_embeddings": 2000}
    for changes, trained in (
        ({"rope_scaling": YARN}, 40960),
        ({"rope_scaling": YARN | inside}, 2000),
        ({"rope_scaling": YARN | inside} | outside, 1000),
    ):
        assert rope_of(changes).trained_positions == trained


NESTED = {kind: {"rope_type": "default", "rope_theta": 3e5} for kind in ("full_attention", "sliding_attention")}


def ropes_of(architecture: str, changes: dict[str, Any]) -> set[float]:
    """The thetas of all layers of a family that has several."""
    sizes = without("rope_theta", "rope_scaling", "hidden_act", "max_window_layers", "sliding_window")
    config = read_model_config(sizes | {"architectures": [architecture]} | changes)
    return {layer.rope.theta for layer in config.layers if layer.rope is not None}


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Olmo3ForCausalLM"])
@pytest.mark.parametrize("scaling", [LINEAR, NESTED], ids=["for all", "by type"])
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
    with pytest.raises(UnsupportedModel, match=r"rope_theta is 10000\.0 .*rope_parameters, .*must say of which"):
        ropes_of("Olmo3ForCausalLM", tables | {"rope_theta": 1e4})
    assert ropes_of("Olmo3ForCausalLM", tables | {"rope_theta": 5e5}) == {3e5, 5e5}
    assert ropes_of("Olmo3ForCausalLM", {"rope_parameters": NESTED, "rope_theta": 1e4}) == {3e5}


# ---- how far


ORIGINAL = {"original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (YARN | ORIGINAL, 131072),  # as Qwen3's page asks for it
        (YARN, 4 * 40960),
        (YARN | {"factor": 1.5} | ORIGINAL, 49152),
        (LINEAR, 4 * 40960),
        (LINEAR | {"factor": 10.0**6}, 1 << 24),
        # The file says how long these are; a "dynamic" one is longer if it is asked to be.
        (LINEAR | {"rope_type": "dynamic"}, 40960),
        (LLAMA3 | ORIGINAL, 40960),
        (LONG | ORIGINAL, 40960),
        ({"rope_type": "su"} | {key: LONG[key] for key in LONG if key != "rope_type"} | ORIGINAL, 40960),
        ({"rope_type": "default", "factor": 4.0}, 40960),
    ],
)
def test_a_model_is_as_long_as_what_it_was_trained_on_times_the_factor(scaling: dict[str, Any], longest: int) -> None:
    """As in vLLM, whether the file asks for it or an option."""
    found = read_model_config(QWEN3_06B | {"rope_scaling": scaling})
    assert found.max_position_embeddings == longest
    assert read_model_config(QWEN3_06B, scaling) == found
    in_the_other = without("rope_theta", "rope_scaling") | {"rope_parameters": {"rope_theta": 1e6}}
    assert read_model_config(in_the_other, scaling) == found
    with pytest.raises(UnsupportedModel, match=r"rope_scaling is .*rope_parameters, which has a rope_theta"):
        read_model_config(in_the_other | {"rope_scaling": scaling})


def test_beyond_what_was_trained_logits_are_those_of_transformers(tmp_path: Path) -> None:
    scaling = YARN | {"original_max_position_embeddings": 32}
    folder = tiny_checkpoint(tmp_path, max_position_embeddings=40)
    config = json.loads((folder / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    tokens = torch.randint(0, 250, (120,), generator=torch.Generator().manual_seed(1)).tolist()
    how = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 40, "use_tqdm": False}
    longest = 128
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": theta}))
    with pytest.raises(InvalidConfig, match=r"max_model_len is 41: .* to 40, .* which rope_scaling may raise"):
        LLM(folder, max_model_len=41, **how)
    with LLM(folder, rope_scaling=json.dumps(scaling), max_model_len=longest, **how) as llm:
        asked = forced_logits(llm, tokens, num_prompt_tokens=110, chunk=50)
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": theta, "rope_scaling": scaling}))
    with pytest.raises(InvalidConfig, match=f"to {longest}, "):
        LLM(folder, max_model_len=longest + 1, **how)
    with LLM(folder, **how) as llm:
        assert llm.engine.max_model_len == longest
        logits = forced_logits(llm, tokens, num_prompt_tokens=110, chunk=50)
    torch.testing.assert_close(logits, asked, rtol=0, atol=0)
    torch.testing.assert_close(logits, reference_logits(reference_model(folder), tokens), rtol=0, atol=1e-4)


def test_a_dynamic_model_is_longer_if_it_is_asked_to_be(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, max_position_embeddings=40)
    how = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "device": "cpu", "num_kv_blocks": 40}
    for asked, found in ((None, 40), (80, 80)):
        with LLM(folder, max_model_len=asked, use_tqdm=False, **how) as llm:
            assert llm.engine.max_model_len == found
    with pytest.raises(InvalidConfig, match=r"max_model_len is 81: .* to 80"):
        LLM(folder, max_model_len=81, use_tqdm=False, **how)


@pytest.mark.parametrize("value", ["{", "[]", "7", {"factor": {1}}, 7, {1: float("nan"), "a": object()}])
def test_a_rope_scaling_that_is_no_table_is_refused(value: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"^rope_scaling is "):
        ModelOptions(rope_scaling=value)
