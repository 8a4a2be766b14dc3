"""Ways to damage a model folder."""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
GENERATION = "generation_config.json"
TABLES = (CONFIG, GENERATION, INDEX)
READ = (*TABLES, WEIGHTS, TOKENIZER)

Damage = Callable[[Path], object]


def exchange(name: str, make: Callable[[Path], object]) -> Damage:
    """Something else at the path of a file."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


def write(name: str, content: bytes | str) -> Damage:
    return exchange(name, lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content))


def change(name: str, **changes: Any) -> Damage:
    """A table with other values; `...` takes a key out."""

    def damage(folder: Path) -> None:
        table = json.loads((folder / name).read_text()) | changes
        write(name, json.dumps({key: value for key, value in table.items() if value is not ...}))(folder)

    return damage


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def make_folder(name: str) -> Damage:
    return exchange(name, Path.mkdir)


def make_link(name: str, target: str) -> Damage:
    return exchange(name, lambda path: path.symlink_to(target))


def make_pipe(name: str) -> Damage:
    """One that nobody writes to: who opens it waits."""
    return exchange(name, os.mkfifo)


def make_sparse(name: str, size: int) -> Damage:
    """A file of so many bytes that take no room."""

    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, size)

    return exchange(name, make)


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


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "head_dim", "max_position_embeddings")
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

PANICS: dict[str, dict[str, Any]] = {
    "no such token": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
    "a vast charsmap": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(struct.pack("<I", 2**32 - 1) + b"\xff" * 19).decode(),
        }
    },
}
"""What makes the library `tokenizers` panic as a file is read."""

DAMAGES: dict[str, Damage] = {
    # sizes
    **{f"{key} {size:.0e}": change(CONFIG, **{key: size}) for key in SIZES for size in (10**9, 10**30)},
    **{f"{key} is half": change(CONFIG, **{key: 1}) for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
    "a million layers": change(CONFIG, num_hidden_layers=10**6),
    "one layer more": change(CONFIG, num_hidden_layers=6),
    "wide and many heads": change(CONFIG, num_attention_heads=2**20, num_key_value_heads=2**20, head_dim=2**20),
    "all sizes at their limits": change(CONFIG, **dict.fromkeys(SIZES, 2**31 - 1)),
    # config.json
    "architectures that are long": change(CONFIG, architectures=["x" * 10_000_000]),
    "an end of text that is deep": change(CONFIG, eos_token_id=DEEP_BUT_READ),
    "a long number": write(CONFIG, '{"vocab_size": ' + "9" * 10_000 + "}"),
    # any table
    **{f"{name} {what}": write(name, content) for name in TABLES for what, content in NO_TABLES.items()},
    **{f"{name} is a folder": make_folder(name) for name in READ},
    **{f"{name} is a link to itself": make_link(name, name) for name in READ},
    **{f"{name} is a device": make_link(name, "/dev/zero") for name in (*TABLES, WEIGHTS)},
    **{f"{name} is a pipe": make_pipe(name) for name in READ},
    **{f"{name} has a terabyte": make_sparse(name, 2**40) for name in (*TABLES, TOKENIZER, TOKENIZER_CONFIG)},
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
    "a header of a million tensors": write(WEIGHTS, header("{" + " " * (17 << 20) + "}")),
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
    **{f"a tokenizer with {what}": change(TOKENIZER, **table) for what, table in PANICS.items()},
    "a tokenizer of numbers": write(
        TOKENIZER, '{"version": "1.0", "model": {"type": "BPE", "vocab": 5, "merges": [1]}}'
    ),
}
"""Ways to damage a model folder, all of which are seen before anything is loaded."""

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
