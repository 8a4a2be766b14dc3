"""Tokenizers of models, with chat templates: from a folder (HFTokenizer), or from a GGUF file (`gguf/tokenizer.py`).

The Rust library `tokenizers` encodes and decodes. transformers is optional: it is loaded for folders whose tokenizer needs more
than its tokenizer.json, and for `hf`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from nanoengine.core import tokenizer as core
from nanoengine.errors import InvalidPrompt, MissingPackage, ModelNotFound, UnsupportedModel
from nanoengine.models.panics import raising
from nanoengine.models.tokenizer_files import (
    SPECIAL_TOKENS,
    check_files,
    fast_tokenizer,
    read_config,
    template_files,
    templates_by_name,
    text_of,
    token_id,
)

Message = Mapping[str, Any]
"""One turn of a chat: {"role": "user", "content": "..."}."""

LONG = 1000
"""The number of tokens from which decoding lasts about a millisecond."""

PLAIN_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers without additions to tokenizer.json."""


class ModelTokenizer(core.Tokenizer, ABC):
    """The tokenizer of a model, with chat templates.

    Attributes:
        hf: the same tokenizer as an object of transformers, made at the first access; raises MissingPackage.
        eos_token_id: the end of text, if the tokenizer has one.
        eos_token_ids: all tokens in the tokenizer's files that end a text or a turn.
        fill_token_names: the tokens of a prefix, a suffix and a middle in a file, see `fill_in_middle`; empty: none.
    """

    fill_token_names: Sequence[str] = ()
    fast: Tokenizer
    hf: Any
    eos_token_id: int | None
    eos_token_ids: list[int]

    @property
    @abstractmethod
    def chat_templates(self) -> Mapping[str, str]:
        """Chat templates by name; "default" is the general one."""

    @abstractmethod
    def _special_tokens(self, template: str) -> Mapping[str, str]:
        """Texts of the special tokens by their names in a template."""

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch of one: unlike `encode`, it releases the GIL.
        return list(raising(self.fast.encode_batch, [text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        options = {"skip_special_tokens": skip_special_tokens}
        if len(token_ids) > LONG:  # as in `_ids`, without the GIL
            return str(raising(self.fast.decode_batch, [token_ids], **options)[0])
        return str(raising(self.fast.decode, token_ids, **options))

    def split(self, text: str, add_special_tokens: bool = True) -> list[str]:
        """The part of the text of each token of `encode`; the concatenated parts are the text.

        An added token has no text, and the last of several tokens of a character has the character.
        """
        [encoding] = raising(self.fast.encode_batch, [text], add_special_tokens=add_special_tokens)
        is_added, spans = encoding.special_tokens_mask, encoding.offsets
        of_text = [i for i, added in enumerate(is_added) if not added]
        names, start = [""] * len(spans), 0
        for i, following in itertools.pairwise(of_text):
            # Some tokenizers omit blanks before a word, and normalizers merge characters.
            between = text[spans[i][1] : spans[following][0]].rstrip()
            end = max(start, min(spans[i][1] + len(between), spans[following][0]))
            names[i], start = text[start:end], end
        if names:
            names[of_text[-1] if of_text else -1] = text[start:]
        return names

    def added_tokens(self) -> list[AddedToken]:
        """Tokens that are matched before a text is normalized or split into words."""
        return [token for token in self.fast.get_added_tokens_decoder().values() if not token.normalized]

    def pieces(self, token_ids: Sequence[int]) -> list[str | None]:
        """The tokens as the vocabulary spells them; None for ids without a token."""
        return [self.fast.id_to_token(token) for token in token_ids]

    def info(self) -> dict[str, Any]:
        """The equivalent of a tokenizer_config.json: special tokens and the chat template."""
        template = self.chat_templates.get("default", "")
        info = {"tokenizer_class": "PreTrainedTokenizerFast", **self._special_tokens(template)}
        return info | ({"chat_template": template} if template else {})

    def encode_chat(
        self,
        messages: Sequence[Message],
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation for the model to continue, by its chat template. Args and errors as `render_chat`."""
        return self.encode(self.render_chat(messages, template_kwargs, tools), add_special_tokens=False)

    def chat_template(self, with_tools: bool) -> str:
        """The chat template, or the one for tools if the model has one.

        Raises:
            InvalidPrompt: there is none.
        """
        # A caller may have set another template on `hf`.
        templates = templates_by_name(self.hf.chat_template) if "hf" in vars(self) else self.chat_templates
        name = "tool_use" if with_tools and "tool_use" in templates else "default"
        if name not in templates:
            raise InvalidPrompt(
                "",
                f"{self.name} has no chat template: complete a plain prompt, or give it one by the option chat_template",
            )
        return templates[name]

    @cached_property
    def _template_client(self) -> Any:  # a process
        from nanoengine.models.template_client import TemplateClient

        return TemplateClient()

    def render_chat(
        self,
        messages: Sequence[Message],
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: bool,
    ) -> str:
        """The text of a conversation, by the chat template of the model.

        Args:
            messages, tools: see `chat_template.render`.
            template_kwargs: variables of the template, such as {"enable_thinking": False} for Qwen3.
            options: `add_generation_prompt` and `continue_final_message` of `chat_template.render`.

        Raises:
            InvalidPrompt: no chat template, or messages that it refuses.
        """
        from nanoengine.models.chat_template import render  # loaded for chats only

        template = self.chat_template(bool(tools))
        process, tokens = self._template_client, self._special_tokens(template)
        return render(template, messages, tools, template_kwargs, client=process, special_tokens=tokens, **options)


class HFTokenizer(ModelTokenizer):
    """The tokenizer files of a model folder.

    Args:
        chat_template: replaces the templates in the files.

    Raises:
        ModelNotFound: the folder has no readable tokenizer. Code in the folder is never run.
        UnsupportedModel: a tokenizer that the library `tokenizers` cannot run.
        MissingPackage: it needs transformers.
    """

    def __init__(self, folder: Path, chat_template: str | None = None):
        self.folder = folder
        self._options = {} if chat_template is None else {"chat_template": chat_template}
        check_files(folder)
        self._config = read_config(folder)
        fast = fast_tokenizer(folder, self._config)
        super().__init__(fast, f"the tokenizer in {folder}")
        self._is_plain = fast is not None  # tokenizer.json is sufficient
        if fast is None:
            fast, self.eos_token_id = getattr(self.hf, "backend_tokenizer", None), self.hf.eos_token_id
            if fast is None:
                why = "is written in Python: give one with a tokenizer.json by the option tokenizer"
                raise UnsupportedModel(f"{self.name} {why}")
            self.fast = fast
        else:
            self.eos_token_id = token_id(fast, self._config["eos_token"])
        self.eos_token_ids = [] if self.eos_token_id is None else [self.eos_token_id]

    @cached_property
    def hf(self) -> Any:
        kind = import_transformers(self.name).AutoTokenizer
        try:
            return raising(kind.from_pretrained, self.folder, trust_remote_code=False, **self._options)
        except Exception as error:  # transformers raises many kinds; all mean an unusable tokenizer
            raise ModelNotFound(f"{self.folder} has no tokenizer that can be read: {error}") from error

    @cached_property
    def chat_templates(self) -> Mapping[str, str]:
        return (
            templates_by_name(self._options.get("chat_template"))
            or template_files(self.folder)
            or templates_by_name(self._config.get("chat_template"))
        )

    def _special_tokens(self, template: str) -> Mapping[str, str]:
        # Other classes of transformers have defaults of special tokens that the files lack.
        has_others = self._config.get("tokenizer_class") not in PLAIN_CLASSES
        uses_them = any(name in template and name not in self._config for name in SPECIAL_TOKENS)
        if not self._is_plain or (has_others and uses_them):
            return dict(self.hf.special_tokens_map)
        return {name: text for name in SPECIAL_TOKENS if isinstance(text := text_of(self._config.get(name)), str)}


def import_transformers(name: str) -> Any:
    """The package transformers; raises MissingPackage."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"{name} takes the package transformers (its tokenizer.json is not sufficient, or the "
            "caller uses `hf`): pip install 'nanoengine[transformers]'"
        ) from error
    return transformers
