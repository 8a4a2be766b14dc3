"""The files of a model folder: all of their tensors, nothing from elsewhere, and nothing that runs code.

Files that are damaged or missing are in tests/models/test_damaged_folders.py.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine.errors import InvalidWeights, ModelNotFound
from nanoengine.models.safetensors_folder import SafetensorsFolder
from tests.models.conftest import INDEX


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, after a look at all headers; in any other order they are the same."""
    checkpoint = SafetensorsFolder(folder)
    headers = list(checkpoint.headers())
    tensors = {name: tensor.clone() for name, tensor in checkpoint.tensors(torch.float32)}
    assert {header.name: tuple(header.shape) for header in headers} == {n: tuple(t.shape) for n, t in tensors.items()}
    with SafetensorsFolder(folder).reader() as reading:
        assert all(torch.equal(reading(header), tensors[header.name]) for header in headers[::-1])
    return tensors


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
    assert read(copy).keys() == read(sharded_copy).keys()
    one, several = SafetensorsFolder(copy).fingerprint(), SafetensorsFolder(sharded_copy).fingerprint()
    assert one != several
    assert one == SafetensorsFolder(copy).fingerprint()
    for folder, before in ((copy, one), (sharded_copy, several)):
        first = min(folder.glob("*.safetensors"))
        tensors = load_file(first)
        next(iter(tensors.values())).view(-1)[3] += 1
        save_file(tensors, first)
        assert SafetensorsFolder(folder).fingerprint() != before


def test_tables_of_the_rotation_are_no_weights(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tables = ("inv_freq", "cos_cached", "sin_cached")
    more = {f"model.layers.0.self_attn.rotary_emb.{name}": torch.ones(8) for name in tables}
    save_file(tensors | more, copy / "model.safetensors")
    assert read(copy).keys() == tensors.keys()


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


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.safetensors"])
def test_a_pickle_is_refused_and_never_opened(copy: Path, tmp_path: Path, name: str) -> None:
    flag = tmp_path / "flag"
    (copy / "model.safetensors").unlink()
    (copy / name).write_bytes(pickle.dumps(Trap(flag)))
    error, said = (
        (InvalidWeights, "cannot be read") if name.endswith("safetensors") else (ModelNotFound, "can run code")
    )
    with pytest.raises(error, match=said):
        read(copy)
    assert not flag.exists()
    pickle.loads((copy / name).read_bytes())
    assert flag.exists(), "the trap works"
