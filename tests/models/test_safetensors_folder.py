"""The files of a model folder: what is broken, missing or foreign is a named error, and no folder ever runs code."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine.errors import InvalidWeights, ModelNotFound, UnsupportedModel
from nanoengine.models.safetensors_folder import SafetensorsFolder
from tests.models.conftest import INDEX


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, after a look at all headers."""
    checkpoint = SafetensorsFolder(folder)
    headers = {header.name: tuple(header.shape) for header in checkpoint.headers()}
    tensors = {name: tensor.clone() for name, tensor in checkpoint.tensors(torch.float32)}
    assert headers == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return tensors


@pytest.mark.parametrize("kind", ["copy", "sharded_copy"])
def test_all_tensors_of_all_files_are_read(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    expected = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    tensors = read(folder)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_any_tensor_is_read_by_its_header(sharded_copy: Path) -> None:
    expected = read(sharded_copy)
    folder = SafetensorsFolder(sharded_copy)
    headers = sorted(folder.headers(), key=lambda header: header.name, reverse=True)
    with folder.reader() as reading:
        assert all(torch.equal(reading(header), expected[header.name]) for header in headers)


def test_a_file_is_opened_when_a_tensor_of_it_is_wanted(sharded_copy: Path) -> None:
    folder = SafetensorsFolder(sharded_copy)
    headers = list(folder.headers())
    broken = headers[-1].file
    (sharded_copy / broken).write_bytes(b"")
    with folder.reader() as reading:
        assert reading(headers[0]).shape == tuple(headers[0].shape)
    with pytest.raises(InvalidWeights, match=f"{broken} cannot be read"), folder.reader() as reading:
        reading(headers[-1])


def test_the_fingerprint_is_that_of_the_bytes(copy: Path, sharded_copy: Path) -> None:
    one, several = SafetensorsFolder(copy).fingerprint(), SafetensorsFolder(sharded_copy).fingerprint()
    assert one != several
    assert one == SafetensorsFolder(copy).fingerprint()
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, copy / "model.safetensors")
    assert SafetensorsFolder(copy).fingerprint() != one


@pytest.mark.parametrize("size", [0, 4, 100, 20_000])
def test_a_truncated_file_is_named(copy: Path, size: int) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InvalidWeights, match=r"model\.safetensors cannot be read as safetensors"):
        read(copy)


def test_a_file_of_noise_is_named(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    with pytest.raises(InvalidWeights, match="cannot be read as safetensors"):
        read(copy)


def test_a_missing_shard_is_named(sharded_copy: Path) -> None:
    shard = sorted(sharded_copy.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelNotFound, match=f"{shard.name} is missing"):
        read(sharded_copy)


@pytest.mark.parametrize("content", ["{", "[]", "5"])
def test_an_index_that_is_no_table_is_refused(sharded_copy: Path, content: str) -> None:
    (sharded_copy / INDEX).write_text(content)
    with pytest.raises(UnsupportedModel, match=INDEX):
        read(sharded_copy)


@pytest.mark.parametrize(
    "weight_map", [None, [], "model.safetensors", {"a": 5}, {"a": ["model.safetensors"]}, {"a": None}]
)
def test_an_index_without_a_usable_weight_map_is_refused(sharded_copy: Path, weight_map: object) -> None:
    (sharded_copy / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidWeights, match="weight_map"):
        read(sharded_copy)


@pytest.mark.parametrize("where", ["../elsewhere.safetensors", "absolute", "sub/../../elsewhere.safetensors"])
def test_an_index_may_not_name_files_outside_of_its_folder(copy: Path, where: str) -> None:
    outside = copy.parent / "elsewhere.safetensors"
    (copy / "model.safetensors").rename(outside)
    name = str(outside) if where == "absolute" else where
    (copy / "sub").mkdir()
    (copy / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(outside), name)}))
    with pytest.raises(InvalidWeights, match=r"elsewhere\.safetensors.*outside"):
        read(copy)


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, flag: Path):
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.flag,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_a_pickle_is_refused_and_never_opened(copy: Path, tmp_path: Path, name: str) -> None:
    flag = tmp_path / "flag"
    (copy / "model.safetensors").unlink()
    (copy / name).write_bytes(pickle.dumps(Trap(flag)))
    with pytest.raises(ModelNotFound, match="can run code"):
        read(copy)
    assert not flag.exists()
    pickle.loads((copy / name).read_bytes())
    assert flag.exists(), "the trap works"


def test_a_pickle_named_safetensors_is_never_unpickled(copy: Path, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    (copy / "model.safetensors").write_bytes(pickle.dumps(Trap(flag)))
    with pytest.raises(InvalidWeights):
        read(copy)
    assert not flag.exists()
