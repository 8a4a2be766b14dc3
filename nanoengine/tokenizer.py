"""HFTokenizer: the tokenizer files of a model folder, behind the few calls that the engine makes.

Text is encoded and decoded by the Rust library `tokenizers`, straight from tokenizer.json. transformers, which takes a second
to import, is loaded for chat templates and for tokenizers that need more than that file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nanoengine.errors import InvalidPrompt, ModelNotFound, shown

Message = Mapping[str, str]
"""One turn of a chat: {"role": "user", "content": "..."}."""

MAX_FILE_BYTES = 256 << 20
"""Largest file that is read; those of the largest vocabularies have a tenth of it."""


class HFTokenizer:
    """Text to token ids and back.

    Raises:
        ModelNotFound: the folder has no tokenizer that can be read. Code in the folder is never run.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        _check_sizes(folder)
        config = _read_config(folder)
        self._fast = _fast_tokenizer(folder, config)
        self.eos_token_id: int | None
        if self._fast is not None:
            self.eos_token_id = _token_id(self._fast, config["eos_token"])
        else:
            self._fast = getattr(self.hf, "backend_tokenizer", None)
            self.eos_token_id = self.hf.eos_token_id

    @cached_property
    def hf(self) -> Any:
        """The same tokenizer as transformers loads it."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        except Exception as error:  # transformers raises many kinds; all mean that these files are no usable tokenizer
            raise ModelNotFound(f"{self.folder} has no tokenizer that can be read: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with whatever the tokenizer adds to one.

        Raises:
            InvalidPrompt: text that is not valid Unicode, such as half of a surrogate pair, or that the tokenizer has no
                tokens for.
        """
        return self._encode(text, add_special_tokens=True)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidPrompt(f"the prompt is not valid Unicode: {error}") from error
        try:
            if self._fast is not None:
                return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)
            return list(self.hf.encode(text, add_special_tokens=add_special_tokens))
        except Exception as error:  # both libraries raise what they like, such as for a missing unknown token
            raise InvalidPrompt(f"the tokenizer in {self.folder} cannot encode the prompt: {error}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids; special tokens have none."""
        if self._fast is not None:
            return str(self._fast.decode(token_ids, skip_special_tokens=True))
        return str(self.hf.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def encode_chat(self, messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a conversation that the model is to continue, by the model's own chat template.

        Raises:
            InvalidPrompt: no chat template, or messages that it does not take.
        """
        if not self.hf.chat_template:
            raise InvalidPrompt(
                f"the tokenizer in {self.folder} has no chat template: use generate with a plain prompt"
            )
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
                raise InvalidPrompt(f"a chat message must have a role and a content, not {shown(message)}")
        try:
            text = self.hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **template_kwargs or {}
            )
        except Exception as error:  # templates raise what their authors chose
            raise InvalidPrompt(f"the chat template refused the messages: {error}") from error
        return self._encode(text, add_special_tokens=False)


def _check_sizes(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        path = folder / name
        if os.path.exists(path) and (size := os.path.getsize(path)) > MAX_FILE_BYTES:
            raise ModelNotFound(
                f"{folder} has no tokenizer that can be read: {name} has {size} bytes, more than {MAX_FILE_BYTES}"
            )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # transformers will say what is wrong, or do without the file
        return {}
    return config if isinstance(config, dict) else {}


def _fast_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer in tokenizer.json; None if there is none, or if tokenizer_config.json asks for more than it has."""
    if "eos_token" not in config or config.get("add_bos_token") or config.get("add_eos_token"):
        return None
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the library raises nothing finer; transformers will say what is wrong, or do without the file
        return None
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, Mapping) or any(str(_token_id(tokenizer, added[number])) != number for number in added):
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _token_id(tokenizer: Tokenizer, token: Any) -> int | None:
    """The id of a token, which files write as a string or as a table; None if the tokenizer has no such token."""
    text: Any = token.get("content") if isinstance(token, Mapping) else token
    try:
        return tokenizer.token_to_id(text)
    except (TypeError, UnicodeEncodeError):  # it is no text at all
        return None
