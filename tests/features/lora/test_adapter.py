"""What a folder must hold: everything that changes what an adapter computes is read, or refused by its name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine.errors import InvalidWeights, ModelNotFound, NanoEngineError, UnsupportedModel
from nanoengine.features.lora.adapter import CONFIG, WEIGHTS, Adapter, read_adapter
from tests.features.lora.written import write_adapter

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
LAYERS = {Q: (24, 16), DOWN: (16, 40)}


def read(folder: Path, max_rank: int = 8, max_bytes: int = 1 << 20) -> Adapter:
    return read_adapter("own", str(folder), LAYERS, max_rank=max_rank, max_bytes=max_bytes)


def test_ranks_and_scales_are_those_of_peft(tmp_path: Path) -> None:
    plain = read(write_adapter(tmp_path / "plain", LAYERS, r=4, lora_alpha=6)).projections
    assert {name: (own.rank, own.scale) for name, own in plain.items()} == {Q: (4, 1.5), DOWN: (4, 1.5)}
    root = read(write_adapter(tmp_path / "root", LAYERS, r=4, lora_alpha=6, use_rslora=True)).projections
    assert root[Q].scale == 3.0
    patterns = {
        "rank_pattern": {"_proj": 8, "q_proj": 2, "model.layers.0.self_attn.q_proj": 8},
        "alpha_pattern": {"1.mlp.down_proj": 10},
    }
    own = read(write_adapter(tmp_path / "patterns", LAYERS, r=4, lora_alpha=6, **patterns)).projections
    assert (own[Q].rank, own[Q].scale, own[DOWN].rank, own[DOWN].scale) == (2, 3.0, 4, 2.5)


@pytest.mark.parametrize("targets", [["q_proj"], r".*\.(q|k)_proj", r"([a-z._0-9]+)+!", "all-linear", "(", None])
def test_the_tensors_say_which_modules_have_an_adapter(tmp_path: Path, targets: object) -> None:
    """`target_modules` may be an expression, some of which never end: it is not read."""
    folder = write_adapter(tmp_path, {Q: LAYERS[Q]})
    change(folder, target_modules=targets)
    assert read(folder).projections.keys() == {Q}


def test_the_digest_is_of_both_files(tmp_path: Path) -> None:
    digests = {
        read(write_adapter(tmp_path / str(number), LAYERS, seed, lora_alpha=alpha)).digest
        for number, (seed, alpha) in enumerate([(1, 8), (2, 8), (1, 9), (1, 8)])
    }
    assert len(digests) == 3


CHANGED: dict[str, Any] = {
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "bias": "all",
    "lora_bias": True,
    "init_lora_weights": "pissa_niter_4",
    "layer_replication": [[0, 4], [2, 5]],
    "peft_type": "IA3",
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_not_computed_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    folder = write_adapter(tmp_path, LAYERS, something_empty=[], init_lora_weights="gaussian")
    assert read(folder).projections.keys() == LAYERS.keys()
    change(folder, **{name: CHANGED[name]})
    with pytest.raises(UnsupportedModel, match=name):
        read(folder)


PUBLISHED = Path(__file__).parents[2] / "models" / "published" / "adapters.json"


@pytest.mark.parametrize("published", json.loads(PUBLISHED.read_text()), ids=lambda published: published["seen"])
def test_what_a_published_adapter_says_is_read(tmp_path: Path, published: dict[str, Any]) -> None:
    folder = write_adapter(tmp_path, LAYERS)
    change(folder, **published["config"] | {"r": 4, "somebodys_note": 1})
    assert read(folder).projections.keys() == LAYERS.keys()


BROKEN: list[tuple[dict[str, Any], type[NanoEngineError], str]] = [
    ({"r": 0}, InvalidWeights, "r is 0"),
    ({"r": 3}, InvalidWeights, r"\[4, 16\] and \[24, 4\], not \[3, 16\]"),
    ({"lora_alpha": float("inf")}, InvalidWeights, "lora_alpha"),
    ({"rank_pattern": {"(": 4}}, UnsupportedModel, r"rank_pattern has the key '\(', and only names"),
    ({"alpha_pattern": {r"([a-z._0-9]+)+!": 4}}, UnsupportedModel, "alpha_pattern has the key"),
    ({"rank_pattern": ["q_proj"]}, InvalidWeights, "must be a table"),
    ({"rank_pattern": {"q_proj": 9}}, UnsupportedModel, r"at most 8 is allowed \(max_lora_rank\)"),
    ({"alpha_pattern": {"q_proj": None}}, InvalidWeights, "alpha_pattern"),
]


@pytest.mark.parametrize(("fields", "error", "message"), BROKEN, ids=lambda own: str(own))
def test_a_config_that_cannot_be_is_told(
    tmp_path: Path, fields: dict[str, Any], error: type[NanoEngineError], message: str
) -> None:
    folder = write_adapter(tmp_path, LAYERS)
    change(folder, **fields)
    with pytest.raises(error, match=message):
        read(folder)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"[" * 100_000, b'"' + b"\xff" * 9])
def test_a_config_that_is_no_object_is_told(tmp_path: Path, content: bytes) -> None:
    write_adapter(tmp_path, LAYERS)
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(InvalidWeights, match=r"adapter_config\.json"):
        read(tmp_path)


def test_tensors_of_other_modules_are_refused(tmp_path: Path) -> None:
    others = {"model.embed_tokens": (300, 16), "lm_head": (300, 16), "model.layers.0.mlp.experts.3.up_proj": (40, 16)}
    for number, (name, shape) in enumerate(others.items()):
        folder = write_adapter(tmp_path / str(number), {name: shape}, targets=[name.rpartition(".")[2]])
        with pytest.raises(UnsupportedModel, match=name):
            read(folder)
    folder = write_adapter(tmp_path / "embedding", LAYERS)
    weights = folder / "adapter_model.safetensors"
    save_file(
        load_file(weights) | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 300)}, weights
    )
    with pytest.raises(UnsupportedModel, match="lora_embedding_A"):
        read(folder)


def test_half_of_a_projection_is_told(tmp_path: Path) -> None:
    weights = write_adapter(tmp_path, LAYERS) / "adapter_model.safetensors"
    tensors = load_file(weights)
    del tensors[f"base_model.model.{Q}.lora_B.weight"]
    save_file(tensors, weights)
    with pytest.raises(InvalidWeights, match=f"of {Q} there is lora_A, and the other part is missing"):
        read(tmp_path)
    save_file({}, weights)
    with pytest.raises(InvalidWeights, match="no tensors"):
        read(tmp_path)


def test_damaged_weights_are_told(tmp_path: Path) -> None:
    weights = write_adapter(tmp_path, LAYERS) / "adapter_model.safetensors"
    sound = weights.read_bytes()
    size = int.from_bytes(sound[:8], "little")
    integers = json.dumps({"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    damaged = [sound[:n] for n in (0, 7, size + 8, len(sound) - 1)] + [b"\xff" * 64]
    for content in (*damaged, len(integers).to_bytes(8, "little") + integers + bytes(8)):
        weights.write_bytes(content)
        with pytest.raises(InvalidWeights, match=r"adapter_model\.safetensors"):
            read(tmp_path)


def test_missing_files_and_limits_are_told(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"adapter_config\.json"):
        read(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match="cannot be read"):
        read(Path("\0"))
    folder = write_adapter(tmp_path / "a", LAYERS)
    with pytest.raises(ModelNotFound, match="at most 100 bytes; 100 is max_lora_bytes"):
        read(folder, max_bytes=100)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelNotFound, match=r"adapter_model\.bin is not read: save it as safetensors"):
        read(folder)


def change(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text()) | fields
    (folder / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = write_adapter(tmp_path, LAYERS)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelNotFound, match=f"{name} cannot be read"):
        read(folder)


def test_a_header_of_many_tensors_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_adapter(tmp_path, LAYERS)
    header = b"{" + b",".join(b'"%d":{}' % number for number in range(200_000)) + b"}"
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    monkeypatch.setattr("nanoengine.features.lora.adapter.deserialize", None)
    with pytest.raises(
        InvalidWeights, match=r"has a header of 2\.183 MiB, and the adapters of this model have at most"
    ):
        read(folder, max_bytes=1 << 30)
