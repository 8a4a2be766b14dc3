"""Tokenizer: text to token ids and back, by the Rust library `tokenizers`; and the tokens that end a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from nanoengine.core.errors import InvalidPrompt, ModelNotFound, UnsupportedModel, shown
from nanoengine.core.model_config import MAX_JSON_BYTES, read_file, read_json


class Tokenizer:
    """A `tokenizers.Tokenizer` (`fast`), and its `name` in messages."""

    def __init__(self, fast: Any, name: str):
        self.fast, self.name = fast, name

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with whatever the tokenizer adds to one unless `add_special_tokens` is False.

        Raises:
            InvalidPrompt: text that is not valid Unicode, such as half of a surrogate pair, or that has no tokens.
        """
        try:
            text.encode()
            return self._ids(text, add_special_tokens)
        except UnicodeEncodeError as error:
            raise InvalidPrompt(f"the prompt is not valid Unicode: {error}") from error
        except Exception as error:  # any class of the library, such as for a missing unknown token
            raise InvalidPrompt(f"{self.name} cannot encode the prompt: {error}") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids. Special tokens are left out, or written as in the vocabulary."""
        return str(self.fast.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_ids(self) -> dict[str, int]:
        """Token texts of the vocabulary -> ids."""
        return dict(self.fast.get_vocab())

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.fast.encode(text, add_special_tokens=add_special_tokens).ids)


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a model folder's tokenizer.json, which may have a byte order mark; raises ModelNotFound without one."""
    path = folder / "tokenizer.json"
    try:
        fast = tokenizers.Tokenizer.from_buffer(read_file(path, 4 * MAX_JSON_BYTES).removeprefix(b"\xef\xbb\xbf"))
    except Exception as error:  # the library raises nothing finer
        raise ModelNotFound(f"{folder} has no tokenizer.json that can be read: {error}") from error
    fast.no_truncation()
    fast.no_padding()
    return Tokenizer(fast, f"the tokenizer in {folder}")


def read_eos_token_ids(folder: Path, vocab_size: int) -> list[int]:
    """End-of-text tokens of config.json and generation_config.json, which may differ: the union."""
    names = [name for name in ("config.json", "generation_config.json") if (folder / name).is_file()]
    return end_token_ids(vocab_size, *(read_json(folder, name).get("eos_token_id") for name in names))


def end_token_ids(vocab_size: int, *stated: Any) -> list[int]:
    """Token ids of fields that are an id, a list of ids, or None; ids beyond the vocabulary are left out."""
    tokens = [each for value in stated if value is not None for each in (value if isinstance(value, list) else [value])]
    if not {int}.issuperset(map(type, tokens)):
        raise UnsupportedModel(f"eos_token_id is {shown(stated)}: it must be a token id or a list of them")
    return sorted({token for token in tokens if 0 <= token < vocab_size})
