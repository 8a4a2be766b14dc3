"""Opening files: one piece or several, and every set of parts that does not belong together is a named error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoengine.errors import InvalidWeights, ModelNotFound
from nanoengine.models.gguf.file import GGUFFile
from tests.models.gguf.written import write_file

COUNT = 3


def write(path: Path, tensors: dict[str, float], **metadata: int | str) -> Path:
    """A file with metadata (`split_no` is `split.no`) and tensors of four equal values."""
    architecture = str(metadata.pop("architecture", "llama"))
    keys = {key.replace("_", "."): value for key, value in metadata.items()}
    return write_file(
        path, architecture, keys, {name: np.full(4, value, np.float32) for name, value in tensors.items()}
    )


def part(folder: Path, number: int, **changes: int | str) -> Path:
    """Part `number`, counted from 0, with a tensor of its own."""
    metadata = {"split_no": number, "split_count": COUNT, "split_tensors_count": COUNT}
    path = folder / f"model-{number + 1:05}-of-{COUNT:05}.gguf"
    return write(path, {f"tensor{number}": number}, **metadata | changes)


@pytest.fixture
def first(tmp_path: Path) -> Path:
    paths = [part(tmp_path, number) for number in range(COUNT)]
    return paths[0]


def test_a_split_file_is_opened_by_its_first_part_whose_metadata_counts(first: Path) -> None:
    part(first.parent, 0, model_size="large")
    file = GGUFFile.open(first)
    assert file.metadata["model.size"] == "large"
    assert list(file.tensors) == ["tensor0", "tensor1", "tensor2"]
    assert [file.data(name).view(np.float32)[0] for name in file.tensors] == [0, 1, 2]
    assert [record.part for record in file.tensors.values()] == [0, 1, 2]
    assert [len(content) for content in file.parts] == [path.stat().st_size for path in sorted(first.parent.iterdir())]


def test_parts_are_found_by_their_names(first: Path) -> None:
    second = first.with_name("model-00002-of-00003.gguf")
    with pytest.raises(InvalidWeights, match=f"part 2 of 3: give the first, {first.name}"):
        GGUFFile.open(second)
    second.unlink()
    with pytest.raises(ModelNotFound, match=r"model-00002-of-00003\.gguf"):
        GGUFFile.open(first)
    with pytest.raises(InvalidWeights, match="one of 3 parts, which must be named"):
        GGUFFile.open(first.rename(first.with_name("model.gguf")))


@pytest.mark.parametrize(
    ("number", "changes", "message"),
    [
        (1, {"split_no": 2}, "does not say that it is part 2 of 3"),
        (2, {"architecture": "qwen2"}, r"disagree about general\.architecture"),
        (0, {"split_count": "three"}, r"split\.count 'three', not a count"),
        (0, {"split_tensors_count": 4}, "hold 3 tensors, not 4"),
    ],
)
def test_parts_that_do_not_belong_together_are_an_error(
    first: Path, number: int, changes: dict[str, Any], message: str
) -> None:
    for other in range(COUNT) if "split_tensors_count" in changes else [number]:
        part(first.parent, other, **changes)
    with pytest.raises(InvalidWeights, match=message):
        GGUFFile.open(first)


def test_a_tensor_in_two_parts_is_an_error(first: Path) -> None:
    part(first.parent, 1).write_bytes(part(first.parent, 1).read_bytes().replace(b"tensor1", b"tensor0"))
    with pytest.raises(InvalidWeights, match="'tensor0' again"):
        GGUFFile.open(first)


def test_a_part_of_one_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", {"w": 1.0}, split_no=0, split_count=1, split_tensors_count=1)
    assert list(GGUFFile.open(path).tensors) == ["w"]


@pytest.mark.parametrize("name", ["nowhere.gguf", "."])
def test_no_file_is_a_named_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="cannot be read"):
        GGUFFile.open(tmp_path / name)


def test_a_part_that_is_a_pipe_is_not_waited_for(first: Path) -> None:
    part = sorted(first.parent.glob("*.gguf"))[-1]
    part.unlink()
    os.mkfifo(part)
    with pytest.raises(ModelNotFound, match="cannot be read"):
        GGUFFile.open(first)


def test_what_is_written_to_the_data_does_not_reach_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", {"w": 1.0})
    GGUFFile.open(path).data("w")[:] = 0
    assert GGUFFile.open(path).data("w").view(np.float32).tolist() == [1, 1, 1, 1]
