"""GGUFTokenizer: the tokenizer in the metadata of a GGUF file, built for the library `tokenizers`.

Keys are those of the format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Tokenizer"). Text is
split and merged, and gets its special tokens, as in llama.cpp with `parse_special` (src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from nanoengine.errors import UnsupportedModel, shown
from nanoengine.models.gguf.pre_tokenizers import PreTokenizer, find_pre_tokenizer
from nanoengine.models.gguf.sentencepiece import find_merges
from nanoengine.models.gguf.special_tokens import (
    CONTROL,
    NAMES,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    ends_of_turn,
    fill_marks,
    special_id,
)
from nanoengine.models.gguf.values import get, numbers, strings
from nanoengine.models.panics import raising
from nanoengine.models.tokenizer import ModelTokenizer, import_transformers
from nanoengine.ram import return_freed_memory

OF_OLLAMA = {"gptoss": "gpt-4o", "mistral3": "tekken", "lfm2": "lfm2"}
"""Architectures whose files by Ollama name no pre-tokenizer -> the pre-tokenizer of their models."""

LONGEST_PIECE = 512
"""Characters of a SentencePiece token; those of models have a tenth of it."""

MAX_CHARS = 8_000_000
"""Of all tokens; those of the largest vocabularies have a quarter of it."""

TEMPLATE_NAMES = ("bos", "eos", "unk", "sep", "pad")


class GGUFTokenizer(ModelTokenizer):
    """The tokenizer in the metadata of a GGUF file; `fast` is built in a thread, as it takes up to a second.

    `fast` raises UnsupportedModel if tokens, scores and merges contradict one another.

    Args:
        metadata: of the file.
        chat_template: replaces the templates in the file.

    Raises:
        UnsupportedModel: a kind of tokenizer other than BPE, SentencePiece's BPE and Gemma 4's, an unknown way to cut text, or
            values that are missing, of a wrong type, or contradict one another.
    """

    def __init__(self, metadata: Mapping[str, Any], chat_template: str | None = None):
        self.name = "the tokenizer in the GGUF file"
        model = get(metadata, "tokenizer.ggml.model", str)
        if model not in ("gpt2", "llama", "gemma4"):
            raise UnsupportedModel(
                f"tokenizer.ggml.model is {shown(model)}: this engine knows gpt2, llama and gemma4;"
                " give the model's tokenizer.json with the option tokenizer"
            )
        tokens = _tokens(metadata)
        vocab = {token: i for i, token in enumerate(tokens)}
        if len(vocab) != len(tokens) and model != "gemma4":  # there, the later of two tokens with one text counts
            raise UnsupportedModel(f"tokenizer.ggml.tokens has {len(tokens)} tokens, of which only {len(vocab)} differ")
        ids = {name: special_id(metadata, key, len(tokens)) for name, key in NAMES.items()}
        kind = _pre_tokenizer(metadata) if model == "gpt2" else None
        if model == "llama":
            defaults = (("unk", 0), ("bos", 1), ("eos", 2))
            ids |= {name: i for name, i in defaults if ids[name] is None and i < len(tokens)}
        types = numbers(metadata, "tokenizer.ggml.token_type", len(tokens), default=NORMAL).astype(np.int64)
        ends, marks = ends_of_turn(vocab, types), fill_marks(metadata, len(tokens))
        for known in (ends, marks):
            types[known] = np.where(types[known] == NORMAL, CONTROL, types[known])
        ends += [i for name in ("eos", "eot", "eom") if (i := ids[name]) is not None]
        self.eos_token_id, self.eos_token_ids = ids["eos"], sorted(set(ends))
        self.special_tokens = {f"{name}_token": tokens[i] for name in TEMPLATE_NAMES if (i := ids[name]) is not None}
        self.fill_token_names = [tokens[i] for i in marks]
        templates = _chat_templates(metadata)
        self._templates = templates if chat_template is None else {"default": chat_template}

        def build() -> Tokenizer:
            if kind is not None:
                tokenizer = _bpe(metadata, vocab, kind)
            else:
                tokenizer = (_sentencepiece if model == "llama" else _lines)(metadata, vocab, ids["unk"])
            _add_special_tokens(tokenizer, metadata, tokens, types)
            _add_ends_of_text(tokenizer, metadata, tokens, ids, kind is None or kind.add_bos)
            return tokenizer

        thread = ThreadPoolExecutor(1)
        self._building = thread.submit(build)
        thread.submit(return_freed_memory)  # of all tokens and merges in lists: several times what the tokenizer holds
        thread.shutdown(wait=False)

    @cached_property
    def fast(self) -> Tokenizer:  # type: ignore[override]
        return self._building.result()

    @property
    def chat_templates(self) -> Mapping[str, str]:
        return self._templates

    @cached_property
    def hf(self) -> Any:
        kind, templates = import_transformers(self.name).PreTrainedTokenizerFast, self.chat_templates
        template = templates.get("default") if len(templates) < 2 else templates
        return kind(tokenizer_object=self.fast, chat_template=template, **self.special_tokens)

    def _special_tokens(self, template: str) -> Mapping[str, str]:
        return self.special_tokens


# ---- the kinds


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = get(metadata, "tokenizer.ggml.pre", str, "default") or "default"
    if name == "default":
        name = OF_OLLAMA.get(get(metadata, "general.architecture", str, ""), name)
    return find_pre_tokenizer(name)


def _bpe(metadata: Mapping[str, Any], vocab: dict[str, int], kind: PreTokenizer) -> Tokenizer:
    """Merges in the order of a list, in words (https://arxiv.org/abs/1508.07909)."""
    tokenizer = Tokenizer(_bpe_model(vocab, _merges(metadata), ignore_merges=kind.ignore_merges))
    tokenizer.pre_tokenizer = kind.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _lines(metadata: Mapping[str, Any], vocab: dict[str, int], unk: int | None) -> Tokenizer:
    """Merges in the order of a list, of characters, in whole lines and in the breaks between them (Gemma 4)."""
    merges = _merges(metadata)
    unk_token = next((token for token, i in vocab.items() if i == unk), None)
    options = {"byte_fallback": True, "unk_token": unk_token, "fuse_unk": True, "ignore_merges": True}
    tokenizer = Tokenizer(_bpe_model(vocab, merges, **options))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], vocab: dict[str, int], unk: int | None) -> Tokenizer:
    """Merges by score: of all adjacent pairs that make a token, the pair of the highest score is merged first."""
    scores = numbers(metadata, "tokenizer.ggml.scores", len(vocab))
    if np.isnan(scores).any():
        raise UnsupportedModel("tokenizer.ggml.scores has a score that is no number")
    add_space = get(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
    if (longest := max(map(len, vocab))) > LONGEST_PIECE:  # every split of it in two is examined
        raise UnsupportedModel(
            f"tokenizer.ggml.tokens has one of {longest} characters: at most {LONGEST_PIECE} are read"
        )
    by_score = np.argsort(-scores, kind="stable").tolist()
    tokens = list(vocab)
    unk_token = None if unk is None else tokens[unk]
    merges = find_merges([tokens[i] for i in by_score], unk_token)
    tokenizer = Tokenizer(_bpe_model(vocab, merges, byte_fallback=True, unk_token=unk_token, fuse_unk=True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if add_space else spaces)
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space else steps)
    return tokenizer


def _merges(metadata: Mapping[str, Any]) -> list[Any]:
    merges = [tuple(merge.split(" ", 1)) for merge in strings(metadata, "tokenizer.ggml.merges")]
    if not {2}.issuperset(map(len, merges)):
        wrong = next(merge for merge in merges if len(merge) != 2)
        raise UnsupportedModel(
            f"tokenizer.ggml.merges has {shown(wrong[0])}: it must be two tokens with a space between"
        )
    return merges


def _bpe_model(vocab: dict[str, int], merges: list[Any], **options: Any) -> models.BPE:
    try:
        return raising(models.BPE, vocab=vocab, merges=merges, **options)
    except Exception as error:  # nothing finer; what is left to go wrong are merges of unknown tokens
        raise UnsupportedModel(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error


# ---- special tokens


def _add_special_tokens(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], types: np.ndarray
) -> None:
    # llama.cpp knows Phi-3 by its name: its special tokens take the spaces that follow them.
    is_phi3 = any(name in get(metadata, "general.name", str, "").lower() for name in ("phi-3", "phi3"))
    keeps_spaces, added = ("<unk>", "<s>", "<|endoftext|>"), []
    for i in np.flatnonzero(np.isin(types, (UNKNOWN, CONTROL, USER_DEFINED))).tolist():
        special, rstrip = bool(types[i] != USER_DEFINED), is_phi3 and tokens[i] not in keeps_spaces
        added.append(AddedToken(tokens[i], normalized=False, special=special, rstrip=rstrip))
    tokenizer.add_tokens(added)


def _add_ends_of_text(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], ids: Mapping[str, int | None], add_bos: bool
) -> None:
    """Have the tokenizer begin a prompt with the first-of-text token, and end it with the last, if the file says so."""
    single, used = ["$A"], []
    for name, default in (("bos", add_bos), ("eos", False)):
        key = f"tokenizer.ggml.add_{name}_token"
        if get(metadata, key, bool, default):
            if (i := ids[name]) is None:
                raise UnsupportedModel(f"{key} is true, but tokenizer.ggml.{name}_token_id is missing")
            used.append({"id": name, "ids": [i], "tokens": [tokens[i]]})
            single.insert(0 if name == "bos" else len(single), name)
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=used)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    keys = {f"tokenizer.chat_template.{name}": name for name in strings(metadata, "tokenizer.chat_templates", [])}
    templates = {name: get(metadata, key, str) for key, name in keys.items()}
    if (default := get(metadata, "tokenizer.chat_template", str, None)) is not None:
        templates["default"] = default
    return templates


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = strings(metadata, "tokenizer.ggml.tokens")
    if not tokens:
        raise UnsupportedModel("tokenizer.ggml.tokens is empty: a tokenizer needs tokens")
    if (size := sum(map(len, tokens))) > MAX_CHARS:
        raise UnsupportedModel(f"tokenizer.ggml.tokens has {size} characters: at most {MAX_CHARS} are read")
    return [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)] if "" in tokens else tokens
