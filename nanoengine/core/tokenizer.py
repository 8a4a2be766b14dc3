"""Tokenizer: text to token ids and back, by a model folder's tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import tokenizers

from nanoengine.core.errors import InvalidPrompt, ModelNotFound
from nanoengine.core.model_config import read_json


class Tokenizer:
    """The tokenizer of a model folder.

    Raises:
        ModelNotFound: the folder has no tokenizer.json that can be read.
    """

    def __init__(self, folder: Path):
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelNotFound(f"{path} is missing or no tokenizer: {error}") from error
        ends: set[int] = set()
        for name in ("config.json", "generation_config.json"):
            if (folder / name).is_file():
                end = read_json(folder, name).get("eos_token_id")
                ends.update(end if isinstance(end, list) else [] if end is None else [end])
        self.eos_token_ids = tuple(sorted(ends))

    def encode(self, text: str) -> list[int]:
        """Token ids, with those that the tokenizer adds to every text."""
        try:
            return list(self._tokenizer.encode(text).ids)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidPrompt(f"the prompt is not valid Unicode: {error}") from error

    def decode(self, token_ids: Seq[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
