"""Names of models: each kind is found where it is, and what is not to be had is a named error that says what is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
import pytest

from nanoengine.errors import ModelNotFound
from nanoengine.models.fetch import DOWNLOADS
from nanoengine.models.names import DEMO, WEIGHT_FILES, find_model, first_parts

PARTS = [f"big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


class Hub:
    """Stands in for the hub's client: one repository, of which it copies what it is asked for."""

    def __init__(self, folder: Path, *files: str):
        self.folder, self.files = folder, files
        self.asked: list[tuple[str, list[str]]] = []

    def snapshot_download(self, repo_id: str, *, allow_patterns: Sequence[str]) -> str:
        self.asked.append((repo_id, list(allow_patterns)))
        if not self.files:
            raise OSError("the network\nis unreachable")
        touch(self.folder, *(file for file in self.files if any(map(Path(file).match, allow_patterns))))
        return str(self.folder)


def install(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> Hub:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


@pytest.fixture
def unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    return install(monkeypatch, Hub(tmp_path))


# ---- bundled and fetched


@pytest.mark.parametrize("name", DOWNLOADS)
def test_a_fetched_model_is_in_the_cache(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelNotFound, match=rf"nanoengine fetch {name}.*nanoengine run {name}"):
        find_model(name)
    kept = tmp_path / "nanoengine" / "models" / DOWNLOADS[name].file
    touch(tmp_path, str(kept))
    assert find_model(name) == kept
    assert find_model("demo") == DEMO


# ---- paths


def test_a_folder_and_a_gguf_file_are_found_by_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    touch(folder, "config.json", "small.gguf", "large.gguf")
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    for name in (str(folder), folder.name, f"./{folder.name}", f"~/{folder.name}"):
        assert find_model(name).resolve() == folder
    touch(folder.parent, "a/b/small.gguf", "a/b/README.md", "a/b/tokenizer.json")
    file = folder.parent / "a/b/small.gguf"
    for name in (str(file), "a/b/small.gguf", "./a/b/small.gguf", "a/b"):
        assert find_model(name).resolve() == file


def test_a_gguf_file_is_known_by_what_it_begins_with(tmp_path: Path) -> None:
    """Ollama calls its files by their hashes."""
    blob, broken = tmp_path / "blobs" / "sha256-0f3a", tmp_path / "blobs" / "sha256-77"
    touch(tmp_path, *map(str, (blob, broken)))
    blob.write_bytes(b"GGUF\3\0\0\0")
    broken.write_bytes(b"GGU")
    os.mkfifo(tmp_path / "blobs" / "pipe")
    for name in (blob, tmp_path / "blobs"):
        assert find_model(str(name)) == blob
    with pytest.raises(ModelNotFound, match="neither a folder nor a GGUF file"):
        find_model(str(broken))


def test_any_part_of_a_model_stands_for_its_first(tmp_path: Path) -> None:
    touch(tmp_path / "alone", *PARTS)
    assert find_model(str(tmp_path / "alone")) == tmp_path / "alone" / PARTS[0]
    touch(tmp_path, *PARTS, "big-00001-of-00004.gguf")
    for named in PARTS:
        assert find_model(str(tmp_path / named)) == tmp_path / PARTS[0]
    with pytest.raises(ModelNotFound, match=rf"name one of {PARTS[0]}, big-00001-of-00004\.gguf$"):
        find_model(str(tmp_path))
    touch(tmp_path / "cut", PARTS[1])
    for name in (tmp_path / "cut" / PARTS[1], tmp_path / "cut"):
        with pytest.raises(ModelNotFound, match=f"{PARTS[0]} is missing"):
            find_model(str(name))


def test_parts_are_of_one_model_if_their_number_is_the_same() -> None:
    files = ["x.gguf", "x-00002-of-00002.gguf", "x-00003-of-00003.gguf", "x-00001-of-00003.gguf", "y-1-of-2.gguf"]
    firsts = ["x-00001-of-00002.gguf", "x-00001-of-00003.gguf", "x.gguf", "y-1-of-2.gguf"]
    assert first_parts(map(Path, files)) == [Path(name) for name in firsts]


# ---- the hub


@pytest.mark.parametrize(
    "name",
    [
        *("/no/such/folder", "./nothing", "../x/y", "~/no-such-folder", "a/b/c", "nothing", "~nobody-9/x", "a\0b"),
        *("nothing.gguf", "one/nothing.gguf", "one/nothing.gguf/", "/no/such/file.gguf", "./a/b/c.gguf"),
        "~nobody-9/b/c.gguf",
        str(Path(__file__)),
    ],
)
def test_what_is_neither_there_nor_a_name_of_the_hub_is_an_error_without_asking_it(unreachable: Hub, name: str) -> None:
    is_path = (name.startswith(("/", ".", "~")) and name != __file__) or ".gguf" in name
    told = "is not there: no file" if is_path else "neither a folder nor a GGUF file.*'demo', 'smollm2'"
    with pytest.raises(ModelNotFound, match=told):
        find_model(name)
    assert unreachable.asked == []


@pytest.mark.parametrize("name", ["someone/model", "someone/model/file.gguf", "someone/model:file.gguf"])
def test_a_hub_without_a_network_is_a_named_error(unreachable: Hub, name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"someone/model.*the network is unreachable"):
        find_model(name)
    assert [repository for repository, _ in unreachable.asked] == ["someone/model"]


def test_a_repository_is_fetched_without_formats_that_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The description first, then the weights."""
    index = "model.safetensors.index.json"
    description = {index, "config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    weights = {"model.safetensors", "model-00001-of-00002.safetensors"}
    code = {"pytorch_model.bin", "modeling_qwen3.py", "weights.pt", "weights.pkl"}
    hub = install(monkeypatch, Hub(tmp_path, *description, *weights, *code))
    assert find_model("someone/model") == tmp_path
    assert set(os.listdir(tmp_path)) == description
    assert find_model("someone/model", WEIGHT_FILES) == tmp_path
    assert set(os.listdir(tmp_path)) == description | weights
    assert {repository for repository, _ in hub.asked} == {"someone/model"}


def test_one_file_of_a_repository_is_fetched_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = install(monkeypatch, Hub(tmp_path, "small.gguf", "Q4/small.gguf", "large.gguf", "config.json"))
    for name in ("someone/model/small.gguf", "someone/model:small.gguf", "someone/model/Q4/small.gguf"):
        file = name.removeprefix("someone/model")[1:]
        assert find_model(name) == tmp_path / file
        assert hub.asked.pop() == ("someone/model", [file])
    assert find_model("someone/model:Q4/small.gguf") == tmp_path / "Q4" / "small.gguf"
    with pytest.raises(ModelNotFound, match=r"someone/model on the hub has no 'other\.gguf'"):
        find_model("someone/model/other.gguf")


def test_all_parts_of_a_model_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Hub(tmp_path, *PARTS, "big-00001-of-00002.gguf", "bigger-00001-of-00003.gguf"))
    assert find_model(f"someone/model/{PARTS[1]}") == tmp_path / PARTS[0]
    assert sorted(os.listdir(tmp_path)) == PARTS
