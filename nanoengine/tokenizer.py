"""HFTokenizer: the tokenizer files of a model folder, through transformers, behind the few calls that the engine makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoengine.errors import InvalidPrompt, ModelNotFound

Message = Mapping[str, str]
"""One turn of a chat: {"role": "user", "content": "..."}."""


class HFTokenizer:
    """Text to token ids and back.

    Raises:
        ModelNotFound: the folder has no tokenizer that can be read. Code in the folder is never run.
    """

    def __init__(self, folder: Path):
        from transformers import AutoTokenizer

        try:
            self.hf: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # transformers raises many kinds; all mean that these files are no usable tokenizer
            raise ModelNotFound(f"{folder} has no tokenizer that can be read: {error}") from error
        self.folder = folder
        # The Rust tokenizer itself decodes about ten times faster than its wrapper; slow tokenizers have none.
        self._backend = getattr(self.hf, "backend_tokenizer", None)

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
        return list(self.hf.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids; special tokens have none."""
        if self._backend is not None:
            return str(self._backend.decode(token_ids, skip_special_tokens=True))
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

    @property
    def eos_token_id(self) -> int | None:
        token: int | None = self.hf.eos_token_id
        return token
