"""HFTokenizer: the tokenizer files of a model folder, behind the few calls that the engine makes.

Text is encoded and decoded by the Rust library `tokenizers`, straight from tokenizer.json. transformers, which takes a second
to import, is loaded for chat templates and for tokenizers that need more than that file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nanoengine.errors import InvalidPrompt, ModelNotFound

Message = Mapping[str, str]
"""One turn of a chat: {"role": "user", "content": "..."}."""


class HFTokenizer:
    """Text to token ids and back.

    Raises:
        ModelNotFound: the folder has no tokenizer that can be read. Code in the folder is never run.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        config = _read_config(folder)
        self._fast = _fast_tokenizer(folder, config)
        self.eos_token_id: int | None
        if self._fast is not None:
            eos = _content(config["eos_token"])
            self.eos_token_id = None if eos is None else self._fast.token_to_id(eos)
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
            InvalidPrompt: text that is not valid Unicode, such as half of a surrogate pair.
        """
        return self._encode(text, add_special_tokens=True)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidPrompt(f"the prompt is not valid Unicode: {error}") from error
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)
        return list(self.hf.encode(text, add_special_tokens=add_special_tokens))

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
                raise InvalidPrompt(f"a chat message must have a role and a content, not {message!r}")
        try:
            text = self.hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **template_kwargs or {}
            )
        except Exception as error:  # templates raise what their authors chose
            raise InvalidPrompt(f"the chat template refused the messages: {error}") from error
        return self._encode(text, add_special_tokens=False)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
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
    if any(tokenizer.token_to_id(_content(token) or "") != int(number) for number, token in added.items()):
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _content(token: Any) -> str | None:
    """The text of a token, which files write as a string or as a table."""
    return token.get("content") if isinstance(token, Mapping) else token
