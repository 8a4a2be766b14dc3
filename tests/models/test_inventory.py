"""What is on this machine: every place is looked into, sizes are those of the files, and one broken model hides no other."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest

from nanoengine.core.model_config import read_json
from nanoengine.models import inventory as module
from nanoengine.models.architectures import read_model_config
from nanoengine.models.fetch import DOWNLOADS, models_folder
from nanoengine.models.inventory import Entry, inventory, table
from nanoengine.models.names import DEMO
from tests.models.gguf.written import write_gguf
from tests.support import tiny_checkpoint

FETCHABLE = list(DOWNLOADS)


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the hub's client, not there yet; that of nanoengine is beside it."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def snapshot(hub: Path, name: str, branch: str = "main", kind: str = "models") -> Path:
    """The empty folder of a repository in the cache."""
    repository = hub / "--".join([kind, *name.split("/")])
    folder = repository / "snapshots" / ("0123456789" * 4)
    folder.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / branch).write_text(folder.name)
    return folder


def copy_demo(folder: Path, *names: str, **changes: object) -> Path:
    for name in names or ("config.json", "model.safetensors"):
        shutil.copy(DEMO / name, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return folder


def found() -> dict[str, Entry]:
    """Entries by name, but those that are everywhere."""
    return {entry.name: entry for entry in inventory() if entry.name not in ("demo", *FETCHABLE)}


def test_without_any_cache_there_is_the_demo_and_what_can_be_fetched() -> None:
    demo, *fetchable = inventory()
    assert (demo.name, demo.problem) == ("demo", "")
    assert demo.config == read_model_config(read_json(DEMO, "config.json"))
    assert demo.config.dtype == "bfloat16"
    assert demo.disk_bytes == sum(file.stat().st_size for file in DEMO.rglob("*") if file.is_file())
    assert [entry.name for entry in fetchable] == FETCHABLE
    for entry in fetchable:
        assert f"nanoengine fetch {entry.name}" in entry.problem
        assert (entry.config, entry.disk_bytes) == (None, 0)


def test_repositories_of_the_hub_are_found_by_name_but_those_that_no_name_leads_to(hub: Path) -> None:
    copy_demo(snapshot(hub, "someone/data", kind="datasets"))
    copy_demo(snapshot(hub, "someone/branch", branch="other"))
    (hub / "stray.txt").touch()
    folder = copy_demo(snapshot(hub, "someone/model"), dtype="float32")
    (entry,) = found().values()
    assert (entry.name, entry.problem) == ("someone/model", "")
    assert entry.disk_bytes == sum(file.stat().st_size for file in folder.iterdir())


def test_what_is_broken_is_told_and_hides_nothing(hub: Path) -> None:
    copy_demo(snapshot(hub, "a/unsupported"), architectures=["BertModel"])
    copy_demo(snapshot(hub, "b/json")).joinpath("config.json").write_text("{")
    snapshot(hub, "c/gguf").joinpath("noise.gguf").write_bytes(bytes(range(256)))
    shutil.rmtree(snapshot(hub, "d/no-snapshots").parent)
    snapshot(hub, "d/empty")
    main = snapshot(hub, "d/no-branch").parents[1] / "refs" / "main"
    main.unlink()
    main.mkdir()
    copy_demo(snapshot(hub, "e/sound"))
    (copy_demo(snapshot(hub, "f/no-weights"), "config.json") / "model.safetensors").symlink_to("../../blobs/not-there")
    models_folder().mkdir(parents=True)
    for name in FETCHABLE:
        DOWNLOADS[name].path.write_bytes(b"GGUF and no more")
    entries = {entry.name: entry.problem for entry in inventory()}
    assert {name for name, problem in entries.items() if not problem} == {"demo", "e/sound"}
    assert "UnsupportedModel: architectures is ['BertModel']" in entries["a/unsupported"]
    told = {"b/json": "not valid JSON", "c/gguf/noise.gguf": "noise.gguf", "d/no-snapshots": "ModelNotFound"}
    told |= dict.fromkeys(("d/empty", "d/no-branch"), "config.json is missing")
    told |= {"f/no-weights": "weights are not here"} | {name: DOWNLOADS[name].file for name in FETCHABLE}
    assert all(words in entries[name] for name, words in told.items())


def test_gguf_files_are_described_from_their_metadata(hub: Path, tmp_path: Path) -> None:
    models_folder().mkdir(parents=True)
    own = write_gguf(tiny_checkpoint(tmp_path / "folder", hidden_size=24), models_folder() / "own.gguf")
    shared = shutil.copy(own, snapshot(hub, "someone/model") / "shared.gguf")
    entries = found()
    assert list(entries) == [str(own), f"someone/model/{shared.name}"]
    for entry in entries.values():
        assert (entry.problem, entry.disk_bytes) == ("", own.stat().st_size)
        assert entry.config is not None
        assert entry.config.hidden_size == 24


def test_parts_of_a_model_are_one_entry_with_the_size_of_all(hub: Path) -> None:
    for folder in (snapshot(hub, "someone/model"), models_folder()):
        folder.mkdir(parents=True, exist_ok=True)
        for number in (1, 2, 3):
            (folder / f"big-0000{number}-of-00003.gguf").write_bytes(bytes(100))
        (folder / "small.gguf").write_bytes(bytes(7))
    big, small = "big-00001-of-00003.gguf", "small.gguf"
    assert {name: entry.disk_bytes for name, entry in found().items()} == {
        str(models_folder() / big): 300,
        str(models_folder() / small): 7,
        f"someone/model/{big}": 300,
        f"someone/model/{small}": 7,
    }


def test_a_model_that_has_no_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    size = (DEMO / "model.safetensors").stat().st_size
    for available, problem in ((size, ""), (size - 1, "not on the CPU: 9.0 MiB of RAM")):
        monkeypatch.setattr(module, "available_ram", lambda available=available: available)
        assert inventory()[0].problem.startswith(problem)
        assert bool(inventory()[0].problem) == bool(problem)


def test_the_table_has_a_line_for_each_and_the_numbers_of_the_demo() -> None:
    demo = inventory()[0]
    head, sound, broken = table([demo, Entry("broken", 3_500_000_000, None, "Oops: " + "why " * 100)]).splitlines()
    assert head.split()[:2] == ["model", "architecture"]
    # The shape of the demo: 2 x 5 layers x 2 heads x 64 numbers of 2 bytes for each of 1,000 tokens.
    assert sound.split("  ")[0] == "demo"
    for cell in ("Qwen3ForCausalLM", "2.4 MiB", "yes"):
        assert cell in sound
    assert broken.split()[:2] == ["broken", "-"]
    assert "3.26 GiB" in broken
    assert broken.endswith("...")
    assert len(broken) < 300


def test_a_pipe_in_the_place_of_a_commit_is_not_waited_for(hub: Path) -> None:
    copy_demo(snapshot(hub, "org/piped"))
    main = hub / "models--org--piped" / "refs" / "main"
    main.unlink()
    os.mkfifo(main)
    assert "config.json" in found()["org/piped"].problem
