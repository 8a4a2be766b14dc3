"""Text to token ids and back, and chats: the tokenizer of a model, from a folder (HFTokenizer) or a GGUF file (GGUFTokenizer).

Text is encoded and decoded by the Rust library `tokenizers`. transformers need not be installed: it is loaded only for folders
whose tokenizer needs more than its tokenizer.json, and for those who ask for its object.
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
from nanoengine.core.model_config import read_file
from nanoengine.errors import InvalidPrompt, MissingPackage, ModelNotFound, UnsupportedModel
from nanoengine.models.json_file import read_json
from nanoengine.models.panics import raising
from nanoengine.sizes import told

Message = Mapping[str, Any]
"""One turn of a chat: {"role": "user", "content": "..."}."""

FILES = tuple(f"{name}.json" for name in ("tokenizer", "tokenizer_config", "special_tokens_map", "added_tokens"))
FILES += ("chat_template.jinja",)
TEMPLATES = "additional_chat_templates"
MAX_FILE_BYTES = 256 << 20
"""Largest file that is read; those of the largest vocabularies have a tenth of it."""

LONG = 1000
"""Tokens that take a millisecond, or longer, to decode."""

SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
PLAIN_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that add nothing to tokenizer.json."""


class ModelTokenizer(core.Tokenizer, ABC):
    """The core's tokenizer, with chats, whichever files it comes from.

    Attributes:
        hf: the same tokenizer as an object of transformers, made when it is first asked for; raises MissingPackage.
        eos_token_id: the end of text, if the tokenizer has one.
        eos_token_ids: all tokens that the tokenizer's files name as an end of text or of a turn.
        fill_names: the marks of a prefix, a suffix and a middle that a file names, see `fill_in_middle`; empty: it names none.
    """

    fill_names: Sequence[str] = ()
    fast: Tokenizer
    hf: Any
    eos_token_id: int | None
    eos_token_ids: list[int]

    @property
    @abstractmethod
    def chat_templates(self) -> Mapping[str, str]:
        """By name; "default" is the one for all occasions."""

    @abstractmethod
    def _special_tokens(self, template: str) -> Mapping[str, str]:
        """Texts of the special tokens by the names that a template uses."""

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch of one: unlike `encode`, it lets other threads of Python run meanwhile.
        return list(raising(self.fast.encode_batch, [text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        options = {"skip_special_tokens": skip_special_tokens}
        if len(token_ids) > LONG:  # as in `_ids`, others may run
            return str(raising(self.fast.decode_batch, [token_ids], **options)[0])
        return str(raising(self.fast.decode, token_ids, **options))

    def split(self, text: str, add_special_tokens: bool = True) -> list[str]:
        """What each token of `encode` stands for in the very text, cut there: all of them together are the text.

        One that was added stands for nothing, and of those that share a character the last has it.
        """
        [found] = raising(self.fast.encode_batch, [text], add_special_tokens=add_special_tokens)
        is_added, spans = found.special_tokens_mask, found.offsets
        own = [i for i, added in enumerate(is_added) if not added]
        names, start = [""] * len(spans), 0
        for i, following in itertools.pairwise(own):
            # Some leave out the blanks before a word, and a normalizer what it puts together with the character before.
            between = text[spans[i][1] : spans[following][0]].rstrip()
            end = max(start, min(spans[i][1] + len(between), spans[following][0]))
            names[i], start = text[start:end], end
        if names:
            names[own[-1] if own else -1] = text[start:]
        return names

    def added_tokens(self) -> list[AddedToken]:
        """Tokens that are looked for before a text is normalized or split into words."""
        return [token for token in self.fast.get_added_tokens_decoder().values() if not token.normalized]

    def pieces(self, token_ids: Sequence[int]) -> list[str | None]:
        """How the vocabulary writes tokens; None for ids that it has no token for."""
        return [self.fast.id_to_token(token) for token in token_ids]

    def info(self) -> dict[str, Any]:
        """What tokenizer_config.json would say: special tokens and the chat template."""
        template = self.chat_templates.get("default", "")
        info = {"tokenizer_class": "PreTrainedTokenizerFast", **self._special_tokens(template)}
        return info | ({"chat_template": template} if template else {})

    def encode_chat(
        self,
        messages: Sequence[Message],
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation that the model is to continue, by the model's own chat template.

        Args and errors are those of `render_chat`.
        """
        return self.encode(self.render_chat(messages, template_kwargs, tools), add_special_tokens=False)

    def chat_template(self, with_tools: bool) -> str:
        """The template of chats, or that of chats with tools where the model has one of its own.

        Raises:
            InvalidPrompt: there is none.
        """
        # Who asked for transformers' object may have given it another template.
        templates = _by_name(self.hf.chat_template) if "hf" in vars(self) else self.chat_templates
        name = "tool_use" if with_tools and "tool_use" in templates else "default"
        if name not in templates:
            raise InvalidPrompt(
                f"{self.name} has no chat template: complete a plain prompt, or give it one by the option chat_template"
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
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation, by the model's own chat template.

        Args:
            messages: the turns, see `chat_template.render`.
            template_kwargs: what the template asks for, such as {"enable_thinking": False} for Qwen3.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: end with the beginning of the model's answer.
            continue_final_message: end in the middle of the last message, which the model then goes on with.

        Raises:
            InvalidPrompt: no chat template, or messages that it does not take.
        """
        from nanoengine.models.chat_template import render  # loaded for chats only

        template = self.chat_template(bool(tools))
        return render(
            *(template, messages),
            client=self._template_client,
            special_tokens=self._special_tokens(template),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )


class GGUFTokenizer(ModelTokenizer):
    """The tokenizer in the metadata of a GGUF file; `fast` is built in a thread, and raises UnsupportedModel if it is broken.

    Args:
        chat_template: in place of those in the file.

    Raises:
        UnsupportedModel: of a kind that this engine does not know, or broken.
    """

    def __init__(self, metadata: Mapping[str, Any], chat_template: str | None = None):
        from nanoengine.models.gguf.tokenizer import read_vocabulary

        self._vocabulary = found = read_vocabulary(metadata)
        self.name = "the tokenizer in the GGUF file"
        self.eos_token_id, self.eos_token_ids = found.eos_token_id, found.end_token_ids
        self.fill_names = found.fill_names
        self._templates = found.chat_templates if chat_template is None else {"default": chat_template}

    @cached_property
    def fast(self) -> Tokenizer:  # type: ignore[override]
        return self._vocabulary.tokenizer

    @property
    def chat_templates(self) -> Mapping[str, str]:
        return self._templates

    @cached_property
    def hf(self) -> Any:
        kind = _transformers(self.name).PreTrainedTokenizerFast
        templates, special_tokens = self.chat_templates, self._vocabulary.special_tokens
        template = templates.get("default") if len(templates) < 2 else templates
        return kind(tokenizer_object=self.fast, chat_template=template, **special_tokens)

    def _special_tokens(self, template: str) -> Mapping[str, str]:
        return self._vocabulary.special_tokens


class HFTokenizer(ModelTokenizer):
    """The tokenizer files of a model folder.

    Args:
        chat_template: in place of those in the files.

    Raises:
        ModelNotFound: the folder has no tokenizer that can be read. Code in the folder is never run.
        UnsupportedModel: it is one that the library `tokenizers` cannot run.
        MissingPackage: it takes transformers to read it.
    """

    def __init__(self, folder: Path, chat_template: str | None = None):
        self.folder = folder
        self._given = {} if chat_template is None else {"chat_template": chat_template}
        _check_files(folder)
        self._config = _read_config(folder)
        fast = _fast_tokenizer(folder, self._config)
        super().__init__(fast, f"the tokenizer in {folder}")
        self._is_plain = fast is not None  # the files are all there is to it
        if fast is None:
            fast, self.eos_token_id = getattr(self.hf, "backend_tokenizer", None), self.hf.eos_token_id
            if fast is None:
                why = "is written in Python: give one with a tokenizer.json by the option tokenizer"
                raise UnsupportedModel(f"{self.name} {why}")
            self.fast = fast
        else:
            self.eos_token_id = _token_id(fast, self._config["eos_token"])
        self.eos_token_ids = [] if self.eos_token_id is None else [self.eos_token_id]

    @cached_property
    def hf(self) -> Any:
        kind = _transformers(self.name).AutoTokenizer
        try:
            return raising(kind.from_pretrained, self.folder, trust_remote_code=False, **self._given)
        except Exception as error:  # transformers raises many kinds; all mean that these files are no usable tokenizer
            raise ModelNotFound(f"{self.folder} has no tokenizer that can be read: {error}") from error

    @cached_property
    def chat_templates(self) -> Mapping[str, str]:
        return (
            _by_name(self._given.get("chat_template"))
            or _template_files(self.folder)
            or _by_name(self._config.get("chat_template"))
        )

    def _special_tokens(self, template: str) -> Mapping[str, str]:
        # Other classes of transformers have special tokens of their own for those that the files say nothing of.
        has_others = self._config.get("tokenizer_class") not in PLAIN_CLASSES
        asked = any(name in template and name not in self._config for name in SPECIAL_TOKENS)
        if not self._is_plain or (has_others and asked):
            return dict(self.hf.special_tokens_map)
        return {name: text for name in SPECIAL_TOKENS if isinstance(text := _text(self._config.get(name)), str)}


def _transformers(name: str) -> Any:
    """The package; raises MissingPackage."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"{name} takes the package transformers (it is more than a sound tokenizer.json, or transformers' own object was "
            "asked for): pip install 'nanoengine[transformers]'"
        ) from error
    return transformers


def _check_files(folder: Path) -> None:
    """See that what the folder holds are files, and those that are read whole of a sane size: a pipe or a device has no end."""
    for path in [*folder.glob("*"), *(folder / TEMPLATES).glob("*")]:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ModelNotFound(f"{path} is neither a file nor a folder: take it out of the model's folder")
        is_read = path.exists() and (path.name in FILES or path.suffix == ".jinja")
        if is_read and (size := path.stat().st_size) > MAX_FILE_BYTES:
            reason = f"{path.name} has {told(size)}, more than {told(MAX_FILE_BYTES)}"
            raise ModelNotFound(f"{folder} has no tokenizer that can be read: {reason}")


def _read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, and what special_tokens_map.json adds to an old one."""
    config = _read_table(folder, "tokenizer_config.json")
    return config if "added_tokens_decoder" in config else config | _read_table(folder, "special_tokens_map.json")


def _read_table(folder: Path, name: str) -> dict[str, Any]:
    try:
        return read_json(folder, name)
    except (ModelNotFound, UnsupportedModel):  # transformers will say what is wrong, or do without the file
        return {}


def _fast_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer in tokenizer.json; None if there is none, or if tokenizer_config.json asks for more than it has."""
    if "eos_token" not in config:
        return None
    try:
        tokenizer: Tokenizer = raising(core.read_tokenizer, folder).fast
        raising(tokenizer.encode, "")
    except ModelNotFound:  # transformers will say what is wrong, or do without the file
        return None
    except Exception as error:
        raise UnsupportedModel(f"{folder / 'tokenizer.json'} is no tokenizer that can be used: {error}") from error
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, Mapping) or any(str(_token_id(tokenizer, added[number])) != number for number in added):
        return None
    try:
        raising(tokenizer.add_tokens, _told_anew(tokenizer, added, config))
    except (TypeError, ValueError):  # transformers will say what is wrong
        return None
    return tokenizer if _adds_what_is_asked(tokenizer, config) else None


def _told_anew(tokenizer: Tokenizer, added: Mapping[str, Any], config: Mapping[str, Any]) -> list[AddedToken]:
    """Tokens of which tokenizer_config.json says something else than tokenizer.json: as in transformers, the former counts. Those
    that it names as special ones are looked for in text, too.
    """
    known = set(map(repr, tokenizer.get_added_tokens_decoder().values()))
    named = [_text(config.get(name)) for name in SPECIAL_TOKENS]
    stated = [AddedToken(**added[number]) for number in sorted(added, key=int)]
    for token in stated:
        token.special = token.special or token.content in named
    contents = {token.content for token in [*stated, *tokenizer.get_added_tokens_decoder().values()]}
    others = [text for text in dict.fromkeys(filter(None, named)) if text not in contents]
    stated += [AddedToken(text, special=True) for text in others if tokenizer.token_to_id(text) is not None]
    return [token for token in stated if repr(token) not in known]


def _adds_what_is_asked(tokenizer: Tokenizer, config: Mapping[str, Any]) -> bool:
    """Whether tokenizer.json alone begins and ends a prompt as tokenizer_config.json asks."""
    asked = {name for name in ("bos_token", "eos_token") if config.get(f"add_{name}")}
    if not asked:
        return True
    ids, ends = tokenizer.encode("").ids, {"bos_token": 0, "eos_token": -1}
    added = {name for name, at in ends.items() if ids and ids[at] == _token_id(tokenizer, config.get(name))}
    return asked <= added


def _text(token: Any) -> Any:
    """A token's text, which files write as a string or as a table."""
    return token.get("content") if isinstance(token, Mapping) else token


def _token_id(tokenizer: Tokenizer, token: Any) -> int | None:
    """The id of a token; None if the tokenizer has no such token."""
    try:
        return tokenizer.token_to_id(_text(token))
    except (TypeError, UnicodeEncodeError):  # it is no text at all
        return None


def _template_files(folder: Path) -> dict[str, str]:
    """chat_template.jinja, and additional_chat_templates/NAME.jinja."""
    paths = {path.stem: path for path in sorted((folder / TEMPLATES).glob("*.jinja"))}
    if (single := folder / "chat_template.jinja").exists():
        paths["default"] = single
    try:
        return {name: read_file(path, MAX_FILE_BYTES).decode() for name, path in paths.items()}
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{folder} has a chat template that cannot be read: {error}") from error


def _by_name(templates: Any) -> dict[str, str]:
    """The templates of a config, which writes one as text and several as a list or a table."""
    if isinstance(templates, str):
        return {"default": templates}
    if isinstance(templates, list):
        tables = [entry for entry in templates if isinstance(entry, Mapping) and isinstance(entry.get("name"), str)]
        templates = {entry["name"]: entry.get("template") for entry in tables}
    if not isinstance(templates, Mapping):
        return {}
    return {name: text for name, text in templates.items() if isinstance(name, str) and isinstance(text, str)}
