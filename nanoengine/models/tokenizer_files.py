"""The tokenizer files of a model folder: their checks, the fast tokenizer in tokenizer.json, and chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from nanoengine.core import tokenizer as core
from nanoengine.core.model_config import read_file, read_json
from nanoengine.errors import ModelNotFound, UnsupportedModel
from nanoengine.models.panics import raising
from nanoengine.sizes import format_bytes

FILES = tuple(f"{name}.json" for name in ("tokenizer", "tokenizer_config", "special_tokens_map", "added_tokens"))
FILES += ("chat_template.jinja",)
TEMPLATES = "additional_chat_templates"
MAX_FILE_BYTES = 256 << 20
"""Limit of a file; the largest vocabularies have a tenth of it."""

SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def check_files(folder: Path) -> None:
    """Check that a folder has regular files only, and none above `MAX_FILE_BYTES`: a pipe or a device has no end.

    Raises:
        ModelNotFound: it does not.
    """
    for path in [*folder.glob("*"), *(folder / TEMPLATES).glob("*")]:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ModelNotFound(f"{path} is neither a file nor a folder: remove it from the model's folder")
        is_read = path.exists() and (path.name in FILES or path.suffix == ".jinja")
        if is_read and (size := path.stat().st_size) > MAX_FILE_BYTES:
            reason = f"{path.name} has {format_bytes(size)}, more than {format_bytes(MAX_FILE_BYTES)}"
            raise ModelNotFound(f"{folder} has no tokenizer that can be read: {reason}")


def read_config(folder: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; of old files, with special_tokens_map.json."""
    config = _read_table(folder, "tokenizer_config.json")
    return config if "added_tokens_decoder" in config else config | _read_table(folder, "special_tokens_map.json")


def _read_table(folder: Path, name: str) -> dict[str, Any]:
    try:
        return read_json(folder, name)
    except (ModelNotFound, UnsupportedModel):  # transformers reports the error, or needs no such file
        return {}


def fast_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer in tokenizer.json; None if there is none, or if tokenizer_config.json has settings that it lacks."""
    if "eos_token" not in config:
        return None
    try:
        tokenizer: Tokenizer = raising(core.read_tokenizer, folder).fast
        raising(tokenizer.encode, "")
    except ModelNotFound:  # transformers reports the error, or needs no such file
        return None
    except Exception as error:
        raise UnsupportedModel(f"{folder / 'tokenizer.json'} is no tokenizer that can be used: {error}") from error
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, Mapping) or any(str(token_id(tokenizer, added[number])) != number for number in added):
        return None
    try:
        raising(tokenizer.add_tokens, _changed_tokens(tokenizer, added, config))
    except (TypeError, ValueError):  # transformers reports the error
        return None
    return tokenizer if _adds_ends(tokenizer, config) else None


def _changed_tokens(tokenizer: Tokenizer, added: Mapping[str, Any], config: Mapping[str, Any]) -> list[AddedToken]:
    """Added tokens whose settings in tokenizer_config.json differ from tokenizer.json: as in transformers, the former has
    precedence. Its special tokens are matched in text, too.
    """
    known = set(map(repr, tokenizer.get_added_tokens_decoder().values()))
    named = [text_of(config.get(name)) for name in SPECIAL_TOKENS]
    stated = [AddedToken(**added[number]) for number in sorted(added, key=int)]
    for token in stated:
        token.special = token.special or token.content in named
    contents = {token.content for token in [*stated, *tokenizer.get_added_tokens_decoder().values()]}
    others = [text for text in dict.fromkeys(filter(None, named)) if text not in contents]
    stated += [AddedToken(text, special=True) for text in others if tokenizer.token_to_id(text) is not None]
    return [token for token in stated if repr(token) not in known]


def _adds_ends(tokenizer: Tokenizer, config: Mapping[str, Any]) -> bool:
    """Whether tokenizer.json adds the first and last tokens of a prompt that tokenizer_config.json requires."""
    required = {name for name in ("bos_token", "eos_token") if config.get(f"add_{name}")}
    ids, ends = tokenizer.encode("").ids, {"bos_token": 0, "eos_token": -1}
    added = {name for name, at in ends.items() if ids and ids[at] == token_id(tokenizer, config.get(name))}
    return required <= added


def text_of(token: Any) -> Any:
    """The text of a token, which is a string or a table in files."""
    return token.get("content") if isinstance(token, Mapping) else token


def token_id(tokenizer: Tokenizer, token: Any) -> int | None:
    """The id of a token; None if the tokenizer has no such token."""
    try:
        return tokenizer.token_to_id(text_of(token))
    except (TypeError, UnicodeEncodeError):  # not a text
        return None


def template_files(folder: Path) -> dict[str, str]:
    """Templates by name: chat_template.jinja, and additional_chat_templates/NAME.jinja."""
    paths = {path.stem: path for path in sorted((folder / TEMPLATES).glob("*.jinja"))}
    if (single := folder / "chat_template.jinja").exists():
        paths["default"] = single
    try:
        return {name: read_file(path, MAX_FILE_BYTES).decode() for name, path in paths.items()}
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{folder} has a chat template that cannot be read: {error}") from error


def templates_by_name(templates: Any) -> dict[str, str]:
    """The templates of a config by name; one is a text there, several are a list or a table."""
    if isinstance(templates, str):
        return {"default": templates}
    if isinstance(templates, list):
        tables = [entry for entry in templates if isinstance(entry, Mapping) and isinstance(entry.get("name"), str)]
        templates = {entry["name"]: entry.get("template") for entry in tables}
    if not isinstance(templates, Mapping):
        return {}
    return {name: text for name, text in templates.items() if isinstance(name, str) and isinstance(text, str)}
