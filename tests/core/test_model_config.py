"""The facts of a model in its config.json: what is missing, wrong or not computed is a named error."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nanoengine.core.errors import ModelNotFound, UnsupportedModel
from nanoengine.core.model_config import read_config, read_file, read_json
from tests import support
from tests.models.configs import QWEN3_06B, VERSION_5


def write(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)


def config_of(folder: Path, table: dict[str, Any]) -> Any:
    write(folder, json.dumps(table).encode())
    return read_config(folder)


@pytest.mark.parametrize("table", [QWEN3_06B, VERSION_5], ids=["transformers 4", "transformers 5"])
def test_qwen3_is_read(tmp_path: Path, table: dict[str, Any]) -> None:
    found = asdict(config_of(tmp_path, table))
    assert found.pop("rope_theta") == 1e6
    assert found.items() <= asdict(support.QWEN3_06B).items()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["LlamaForCausalLM"]),
        ("architectures", None),
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_type", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}),
        ("rope_type", {"rope_parameters": 5}),
        ("quantization_config", {"quant_method": "awq"}),
        ("head_dim", 127),
        ("num_attention_heads", 17),
        ("vocab_size", "many"),
        ("hidden_size", None),
        ("num_hidden_layers", True),
        ("intermediate_size", 10**100),
        ("rms_norm_eps", "small"),
        ("rope_theta", -1),
        ("tie_word_embeddings", "yes"),
        ("torch_dtype", "float8"),
    ],
)
def test_what_is_not_computed_missing_or_wrong_is_named(tmp_path: Path, key: str, value: Any) -> None:
    changes = value if isinstance(value, dict) and "rope_parameters" in value else {key: value}
    with pytest.raises(UnsupportedModel, match=key.removeprefix("torch_")):
        config_of(tmp_path, QWEN3_06B | changes)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, ModelNotFound, r"config\.json is missing"),
        *((content, UnsupportedModel, r"config\.json is not valid JSON") for content in (b"{", b"", b"\xff\xfe\xfa")),
        (b'{"a":' * 100_000, UnsupportedModel, r"not valid JSON.*recursion"),
        *((content, UnsupportedModel, r"config\.json must hold a JSON table") for content in (b"[]", b"3", b"null")),
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_is_no_table_is_named(tmp_path: Path, content: bytes | None, error: type[Exception], message: str) -> None:
    if content is not None:
        write(tmp_path, content)
    with pytest.raises(error, match=message):
        read_json(tmp_path, "config.json")


def test_only_regular_files_that_are_not_too_large_are_read(tmp_path: Path) -> None:
    """None of the others is waited for, or read at all."""
    sound = tmp_path / "sound"
    sound.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(sound)
    assert read_file(sound, 5) == read_file(tmp_path / "link", 5) == b"12345"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 2**40)
    for name, most in (("sound", 4), ("pipe", 5), ("device", 5), ("loop", 5), ("sparse", 2**39), (".", 5), ("none", 5)):
        with pytest.raises(OSError, match=r"regular file|symbolic links|directory"):
            read_file(tmp_path / name, most)
