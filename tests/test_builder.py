"""The composition root: what reaches which part, and that no model folder is loaded before it was found sound."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM
from nanoengine.builder import CAPABILITIES, build_engine, option_types, read_config
from nanoengine.core.capability import Capability
from nanoengine.core.model_runner import ModelRunner
from nanoengine.core.startup import Startup
from nanoengine.errors import InvalidConfig, ModelNotFound, NanoEngineError, UnsupportedModel
from nanoengine.models import placement
from nanoengine.models.capability import Models
from nanoengine.models.names import DEMO
from nanoengine.speculation.drafter import Drafter

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
GENERATION = "generation_config.json"

Damage = Callable[[Path], object]


def described(model: Path = DEMO) -> Models:
    """What the files of a model say; nothing is loaded."""
    models = Models()
    Startup(read_config(str(model), {}), [models]).describe()
    return models


@pytest.fixture
def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Startup, "load", lambda _: pytest.fail("memory was taken for it"))


# ---- capabilities and their options


def test_the_names_of_options_are_the_fields_of_their_classes() -> None:
    """`CAPABILITIES` says them again: of what is not installed, nothing else is known."""
    for folder, own in CAPABILITIES.items():
        if own.options is None:
            assert own.names == ()
            continue
        kind = getattr(import_module(f"nanoengine.{folder}.options"), own.options)
        assert own.names == tuple(field.name for field in fields(kind))
        assert kind in option_types()


def test_every_capability_is_one_and_knows_its_options() -> None:
    for folder, own in CAPABILITIES.items():
        kind = getattr(import_module(f"nanoengine.{folder}.capability"), own.capability)
        assert issubclass(kind, Capability)
        assert (kind.options and kind.options.__name__) == own.options


def test_options_can_be_sent_to_another_process() -> None:
    config = read_config("demo", {"max_num_seqs": 3, "speculation": "ngram", "kv_host_memory": 1 << 20})
    assert pickle.loads(pickle.dumps(config)) == config


# ---- what reaches which part


def test_what_is_asked_for_reaches_the_parts() -> None:
    options: dict[str, Any] = {
        "device": "cpu",
        "max_num_seqs": 5,
        "num_kv_blocks": 20,
        "block_size": 32,
        "max_model_len": 64,
        "max_num_batched_tokens": 100,
        "long_prefill_token_threshold": 7,
        "scheduling_policy": "mixed",
        "enable_prefix_caching": False,
        "async_scheduling": True,
    }
    built = build_engine(read_config("demo", options), use_tqdm=False)
    engine, scheduler, runner = built.engine, built.engine.scheduler, built.engine.executor
    assert isinstance(runner, ModelRunner)
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_chunk) == (5, 100, 7)
    assert scheduler.policy == "mixed"
    assert (scheduler.blocks.num_blocks, scheduler.blocks.block_size) == (20, runner.block_size) == (20, 32)
    assert not scheduler.blocks.enable_prefix_caching
    assert (engine.depth, engine.max_model_len) == (2, 64)
    assert engine.vocab_size == built.models.model_config.vocab_size == 4096
    assert engine.eos_token_ids == (0,)
    assert runner.rows.padding_row == 5
    engine.close()


def test_nothing_is_added_unless_it_is_asked_for() -> None:
    engine = build_engine(read_config("demo", {"num_kv_blocks": 20, "max_model_len": 64}), use_tqdm=False).engine
    assert not any(isinstance(part, Drafter) for part in engine.scheduler.parts)
    assert isinstance(engine.executor, ModelRunner)
    metrics = LLM("demo", num_kv_blocks=20, max_model_len=64, use_tqdm=False).metrics
    assert (metrics.offload, metrics.speculation) == (None, None)


def test_weights_that_ram_has_no_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "available_ram", lambda: 1 << 20)
    with pytest.raises(InvalidConfig, match=r"the weights take \d+ bytes, but 1048576 bytes of RAM"):
        LLM("demo", device="cpu", dtype="float32", use_tqdm=False)


# ---- hostile folders


def write(name: str, content: bytes | str) -> Damage:
    """A file of one's own instead of the one that is there."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def change(name: str, **changes: Any) -> Damage:
    """A table with other values; `...` takes a key out."""

    def damage(folder: Path) -> None:
        table = json.loads((folder / name).read_text()) | changes
        write(name, json.dumps({key: value for key, value in table.items() if value is not ...}))(folder)

    return damage


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def make_folder(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return damage


def make_link(name: str, target: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return damage


def make_sparse(name: str, size: int) -> Damage:
    """A file of so many bytes that take no room."""

    def damage(folder: Path) -> None:
        write(name, "")(folder)
        with open(folder / name, "r+b") as file:
            file.truncate(size)

    return damage


def listed(*files: Any) -> Damage:
    """An index that says in which files tensors are."""
    return write(INDEX, json.dumps({"weight_map": {f"tensor {i}": file for i, file in enumerate(files)}}))


def header(text: str, num_bytes: int = 64) -> bytes:
    """A safetensors file with that header."""
    return struct.pack("<Q", len(text)) + text.encode() + bytes(num_bytes)


def one_tensor(dtype: str, shape: list[int], *offsets: int, name: str = "model.norm.weight") -> Damage:
    entry = {name: {"dtype": dtype, "shape": shape, "data_offsets": offsets or [0, 64]}}
    return write(WEIGHTS, header(json.dumps(entry)))


def truncated(size: int) -> Damage:
    return lambda folder: write(WEIGHTS, (folder / WEIGHTS).read_bytes()[:size])(folder)


def without_a_tensor(folder: Path) -> None:
    """The header calls one of its tensors otherwise."""
    content = (folder / WEIGHTS).read_bytes()
    write(WEIGHTS, content.replace(b"model.norm.weight", b"model.worm.weight", 1))(folder)


def with_another_shape(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    assert b"[4096,256]" in content
    write(WEIGHTS, content.replace(b"[4096,256]", b"[256,4096]", 1))(folder)


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
DEEP_LIST, DEEP_TABLE = "[" * 100_000, '{"a":' * 100_000
NO_TABLES: dict[str, bytes | str] = {
    "is empty": b"",
    "is deep lists": DEEP_LIST,
    "is deep tables": DEEP_TABLE,
    "is a list": "[]",
    "is no UTF-8": b'{"\xff": 1}',
    "is cut short": b'{"a": ',
    "is noise": bytes(range(256)),
}
DEEP_BUT_READ = json.loads("[" * 300 + "]" * 300)
ARCHITECTURE = "Qwen3ForCausalLM"

DAMAGES: dict[str, Damage] = {
    # sizes
    **{f"{key} {size:.0e}": change(CONFIG, **{key: size}) for key in SIZES for size in (10**9, 10**11, 10**30)},
    **{f"{key} is half": change(CONFIG, **{key: 1}) for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
    **{
        f"{key} {value!r}": change(CONFIG, **{key: value})
        for key in ("vocab_size", "head_dim")
        for value in (-1, 1e9, "9")
    },
    "a million layers": change(CONFIG, num_hidden_layers=10**6),
    "one layer more": change(CONFIG, num_hidden_layers=6),
    "wide and many heads": change(CONFIG, num_attention_heads=2**20, num_key_value_heads=2**20, head_dim=2**20),
    "all sizes at their limits": change(CONFIG, **dict.fromkeys(SIZES, 2**31 - 1)),
    "an epsilon that is no float": change(CONFIG, rms_norm_eps=10**400),
    "an angle that is no float": change(CONFIG, rope_parameters={"rope_theta": 10**400}),
    "an angle that is not a number": write(CONFIG, '{"architectures": ["Qwen3ForCausalLM"], "rope_theta": NaN}'),
    # config.json
    "architectures 7": change(CONFIG, architectures=7),
    "architectures true": change(CONFIG, architectures=True),
    "architectures as text": change(CONFIG, architectures=ARCHITECTURE),
    "architectures as a table": change(CONFIG, architectures={ARCHITECTURE: 1}),
    "architectures of lists": change(CONFIG, architectures=[[ARCHITECTURE]]),
    "architectures that are deep": change(CONFIG, architectures=DEEP_BUT_READ),
    "architectures that are long": change(CONFIG, architectures=["x" * 10_000_000]),
    "a dtype that is a table": change(CONFIG, dtype={"float32": 1}),
    "a dtype that is deep": change(CONFIG, dtype=DEEP_BUT_READ),
    "a quantization that is deep": change(CONFIG, quantization_config=DEEP_BUT_READ),
    "a rotation that is deep": change(CONFIG, rope_parameters={"rope_type": DEEP_BUT_READ}),
    "rotations of all sorts": change(CONFIG, rope_parameters=[[]]),
    "an end of text that is deep": change(CONFIG, eos_token_id=DEEP_BUT_READ),
    "an end of text that is text": change(CONFIG, eos_token_id="0"),
    "a long number": write(CONFIG, '{"vocab_size": ' + "9" * 10_000 + "}"),
    # any table
    **{
        f"{name} {what}": write(name, content)
        for name in (CONFIG, GENERATION, INDEX)
        for what, content in NO_TABLES.items()
    },
    **{f"{name} is a folder": make_folder(name) for name in (CONFIG, GENERATION, INDEX, WEIGHTS, TOKENIZER)},
    **{
        f"{name} is a link to itself": make_link(name, name) for name in (CONFIG, GENERATION, INDEX, WEIGHTS, TOKENIZER)
    },
    **{f"{name} is a device": make_link(name, "/dev/zero") for name in (CONFIG, GENERATION, INDEX, WEIGHTS)},
    **{
        f"{name} has a terabyte": make_sparse(name, 2**40)
        for name in (CONFIG, GENERATION, INDEX, TOKENIZER, TOKENIZER_CONFIG)
    },
    **{f"no {name}": remove(name) for name in (CONFIG, WEIGHTS, TOKENIZER)},
    "an end of generation that is a table": change(GENERATION, eos_token_id={}),
    "an end of generation that is deep": change(GENERATION, eos_token_id=DEEP_BUT_READ),
    # the index
    "a file name too long": listed("m" * 5000 + ".safetensors"),
    "a file name with NUL": listed("model\0.safetensors"),
    "a file name of half a pair": listed("\ud800.safetensors"),
    "a path too long": listed("m/" * 5000 + WEIGHTS),
    "a path from the root": listed("/etc/passwd"),
    "a path upwards": listed("../" + WEIGHTS),
    "the folder above": listed(".."),
    "the folder itself": listed("."),
    "no file name": listed(""),
    "a file that is no weights": listed(CONFIG),
    "a file that is missing": listed(WEIGHTS, "more.safetensors"),
    "a list for a file name": listed([WEIGHTS]),
    "no files at all": listed(),
    "an index without a map": write(INDEX, "{}"),
    # weights
    **{f"weights of {size} bytes": truncated(size) for size in (0, 7, 8, 100, 100_000)},
    "weights of noise": write(WEIGHTS, bytes(range(256)) * 40),
    "weights of a terabyte": make_sparse(WEIGHTS, 2**40),
    "a header of 2**63 bytes": write(WEIGHTS, struct.pack("<Q", 2**63) + b"{}"),
    "a header of 99 MB that is not there": write(WEIGHTS, struct.pack("<Q", 99_000_000) + b"{}"),
    "a header that is deep": write(WEIGHTS, header(DEEP_TABLE)),
    "a header that is a list": write(WEIGHTS, header("[]")),
    "a header that is no UTF-8": write(WEIGHTS, struct.pack("<Q", 8) + b'{"\xff": 1}'),
    "a header without tensors": write(WEIGHTS, header("{}", 0)),
    "a tensor name that is long": one_tensor("F32", [16], name="n" * 1_000_000),
    "a tensor name with NUL": one_tensor("F32", [16], name="model.norm.weight\0"),
    "a tensor alone": one_tensor("F32", [16]),
    "a tensor of another dtype": one_tensor("I8", [64]),
    "a tensor of no dtype": one_tensor("F99", [16]),
    "a tensor of four bits": one_tensor("F4", [128]),
    "a tensor of complex numbers": one_tensor("C64", [8]),
    "a tensor too large for its bytes": one_tensor("F32", [2**40, 2**40]),
    "a tensor of less than nothing": one_tensor("F32", [-16]),
    "a tensor of nothing, but large": one_tensor("F32", [0, 2**62, 2**62], 0, 0),
    "a tensor that ends before it begins": one_tensor("F32", [16], 64, 0),
    "a tensor beyond the end": one_tensor("F32", [16], 2**62, 2**62 + 64),
    "a tensor with another name": without_a_tensor,
    "a tensor with another shape": with_another_shape,
    # the tokenizer
    **{f"{TOKENIZER} {what}": write(TOKENIZER, content) for what, content in NO_TABLES.items()},
    "a tokenizer without a model": write(TOKENIZER, '{"version": "1.0"}'),
    "a tokenizer of nothing": write(TOKENIZER, '{"version": "1.0", "model": {"type": "BPE"}}'),
    "a tokenizer of numbers": write(
        TOKENIZER, '{"version": "1.0", "model": {"type": "BPE", "vocab": 5, "merges": [1]}}'
    ),
}
"""Ways to damage a model folder, all of which are seen before anything is loaded."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled model with its weights behind a link, as in the cache of the hub."""
    copy = tmp_path / "model"
    copy.mkdir()
    for name in (CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, "chat_template.jinja"):
        shutil.copy(DEMO / name, copy / name)
    (copy / WEIGHTS).symlink_to(DEMO / WEIGHTS)
    return copy


def test_a_folder_that_is_not_damaged_is_sound(folder: Path) -> None:
    assert described(folder).model_config == described().model_config


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_a_named_error_and_never_loaded(folder: Path, damage: Damage) -> None:
    damage(folder)
    with pytest.raises(NanoEngineError) as raised:
        build_engine(read_config(str(folder), {}), use_tqdm=False)
    assert len(str(raised.value)) < 6000, "a message can be read"


ODD_BUT_SOUND: dict[str, Damage] = {
    f"{TOKENIZER_CONFIG} {what}": write(TOKENIZER_CONFIG, content)
    for what, content in {
        **NO_TABLES,
        "has an end of text that is a number": '{"eos_token": 5}',
        "has an end of text that is no text": '{"eos_token": "\\ud800"}',
        "has an end of text that is a list": '{"eos_token": ["<|endoftext|>"]}',
        "has added tokens in a list": '{"eos_token": null, "added_tokens_decoder": [1]}',
        "has added tokens without numbers": '{"eos_token": null, "added_tokens_decoder": {"x": {"content": 7}}}',
        "has added tokens that are deep": json.dumps({"eos_token": None, "added_tokens_decoder": {"1": DEEP_BUT_READ}}),
        "asks for a class that is not there": '{"tokenizer_class": "NoSuchTokenizer"}',
        "asks for a class that is none": '{"tokenizer_class": 5}',
    }.items()
} | {
    "no generation config": remove(GENERATION),
    "no tokenizer config": remove(TOKENIZER_CONFIG),
    "tokenizer_config.json is a folder": make_folder(TOKENIZER_CONFIG),
    "tokenizer_config.json is a link to itself": make_link(TOKENIZER_CONFIG, TOKENIZER_CONFIG),
    "an end of text beyond the vocabulary": change(CONFIG, eos_token_id=[10**30, -1]),
}
"""What another reader may make sense of: the same tokens or a named error, and nothing else."""


@pytest.mark.parametrize("damage", ODD_BUT_SOUND.values(), ids=ODD_BUT_SOUND)
def test_an_odd_folder_gives_the_same_tokens_or_a_named_error(folder: Path, damage: Damage) -> None:
    damage(folder)
    try:
        tokenizer = described(folder).tokenizer
    except NanoEngineError:
        return
    assert tokenizer.encode("def f(x):") == described().tokenizer.encode("def f(x):")


NO_PATHS = [
    "/" + "n" * 5000,
    "/" + "n/" * 5000,
    "nul\0",
    "/nul\0/model",
    "a/\0",
    "\ud800",
    "/\ud800",
    "x/\ud800",
    "~\0",
    "a/" + "n" * 5000,
]


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize("path", NO_PATHS, ids=lambda path: ascii(path[:9]))
def test_what_cannot_be_a_path_is_no_model_and_no_tokenizer(path: str) -> None:
    with pytest.raises(ModelNotFound) as raised:
        build_engine(read_config(path, {}), use_tqdm=False)
    assert len(str(raised.value)) < 6000
    with pytest.raises(ModelNotFound):
        build_engine(read_config("demo", {"tokenizer": path}), use_tqdm=False)


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize("name", [CONFIG, GENERATION, INDEX, WEIGHTS])
def test_a_file_that_may_not_be_read_is_a_named_error(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(path: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    if name == INDEX:
        listed(WEIGHTS)(folder)
    read_text = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, **rest: (refuse if path.name == name else read_text)(path, **rest)
    )
    monkeypatch.setattr("nanoengine.core.weights.safe_open", refuse)
    with pytest.raises(NanoEngineError, match="cannot be read"):
        build_engine(read_config(str(folder), {}), use_tqdm=False)


def test_the_first_thing_that_is_wrong_is_told_with_its_value(folder: Path) -> None:
    change(CONFIG, vocab_size=10**11)(folder)
    with pytest.raises(UnsupportedModel, match=r"vocab_size is 100000000000 in .*at most 2147483647"):
        described(folder)
