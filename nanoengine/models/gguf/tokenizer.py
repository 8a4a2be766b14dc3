"""The tokenizer that a GGUF file describes in its metadata, built for the library `tokenizers`.

Keys are those of the format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Tokenizer"). Text is cut, merged and
given its special tokens as llama.cpp does it with `parse_special` (src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from nanoengine.errors import UnsupportedModel, shown
from nanoengine.models.gguf.pre_tokenizers import PreTokenizer, find_pre_tokenizer
from nanoengine.models.gguf.sentencepiece import find_merges
from nanoengine.models.panics import raising
from nanoengine.ram import return_freed_memory

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of tokens (tokenizer.ggml.token_type). All but the first are found in text before anything else is done to it."""

NAMES = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "sep": "seperator", "pad": "padding"}
"""Special tokens, and their names in the keys. The format spells the separator so."""

NO_TOKEN = (1 << 32) - 1
"""What converters write of the id -1, which says that there is none."""

OF_OLLAMA = {"gptoss": "gpt-4o", "mistral3": "tekken", "lfm2": "lfm2"}
"""Architectures whose files by Ollama name no way to cut text -> the one that their models have."""

UNUSED = ("seperator", "padding")
"""Special tokens that no prompt gets: some files have ids for them that are none of the model's."""

LONGEST_PIECE = 512
"""Characters of a SentencePiece token; those of models have a tenth of it."""

MAX_CHARS = 8_000_000
"""Of all tokens; those of the largest vocabularies have a quarter of it."""

FILL_NAMES = (("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle"))
"""Names in the keys of the marks of `nanoengine/models/fill_in_middle.py`: those of today, and those of older files."""

TEMPLATE_NAMES = ("bos", "eos", "unk", "sep", "pad")

ENDS_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>", "<eos>", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)
"""Texts of tokens that end a turn, as llama.cpp has it: many files name one of their ends only."""


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """What a file says of text and tokens.

    Attributes:
        building: of the tokenizer, in a thread, as it takes up to a second.
        special_tokens: texts of the special tokens by the names that chat templates use, such as "bos_token".
        eos_token_id: the end of text.
        end_token_ids: that one, and all other ends of a turn, in ascending order.
        chat_templates: by name; "default" is the one without a name.
        fill_token_names: texts of the marks before a prefix, a suffix and a middle; empty: the file names none.
    """

    building: Future[Tokenizer]
    special_tokens: dict[str, str]
    eos_token_id: int | None
    end_token_ids: list[int]
    chat_templates: dict[str, str]
    fill_token_names: list[str]

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back; encodes with the tokens that the file adds to a prompt.

        Raises:
            UnsupportedModel: tokens, scores and merges contradict one another.
        """
        return self.building.result()


def read_vocabulary(metadata: Mapping[str, Any]) -> GGUFVocabulary:
    """What `metadata`, the table of a GGUF file, says of text and tokens.

    Raises:
        UnsupportedModel: a kind of tokenizer other than BPE, SentencePiece's BPE and Gemma 4's, an unknown way to cut text, or
            values that are missing, of a wrong type, or contradict one another.
    """
    model = _get(metadata, "tokenizer.ggml.model", str)
    if model not in ("gpt2", "llama", "gemma4"):
        raise UnsupportedModel(
            f"tokenizer.ggml.model is {shown(model)}: this engine knows gpt2, llama and gemma4;"
            " give the model's tokenizer.json with the option tokenizer"
        )
    tokens = _tokens(metadata)
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens) and model != "gemma4":  # where of two tokens with one text the later is meant
        raise UnsupportedModel(f"tokenizer.ggml.tokens has {len(tokens)} tokens, of which only {len(vocab)} differ")
    ids = {name: _special_id(metadata, key, len(tokens)) for name, key in NAMES.items()}
    kind = _pre_tokenizer(metadata) if model == "gpt2" else None
    if model == "llama":
        ids |= {name: i for name, i in (("unk", 0), ("bos", 1), ("eos", 2)) if ids[name] is None and i < len(tokens)}
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens), default=NORMAL).astype(np.int64)
    ends = _ends_of_turn(vocab, types)
    types[ends] = np.where(types[ends] == NORMAL, CONTROL, types[ends])
    ends += [i for name in ("eos", "eot", "eom") if (i := ids[name]) is not None]
    marks = _fill_marks(metadata, len(tokens))
    types[marks] = np.where(types[marks] == NORMAL, CONTROL, types[marks])

    def build() -> Tokenizer:
        if kind is not None:
            tokenizer = _bpe(metadata, vocab, kind)
        else:
            tokenizer = (_sentencepiece if model == "llama" else _lines)(metadata, vocab, ids["unk"])
        _add_special_tokens(tokenizer, metadata, tokens, types)
        _add_ends_of_text(tokenizer, metadata, tokens, ids, kind is None or kind.add_bos)
        return tokenizer

    thread = ThreadPoolExecutor(1)
    building = thread.submit(build)
    thread.submit(return_freed_memory)  # of all tokens and merges in lists: several times what the tokenizer holds
    thread.shutdown(wait=False)
    return GGUFVocabulary(
        building,
        {f"{name}_token": tokens[i] for name in TEMPLATE_NAMES if (i := ids[name]) is not None},
        ids["eos"],
        sorted(set(ends)),
        _chat_templates(metadata),
        [tokens[i] for i in marks],
    )


# ---- the kinds


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = _get(metadata, "tokenizer.ggml.pre", str, "default") or "default"
    if name == "default":
        name = OF_OLLAMA.get(_get(metadata, "general.architecture", str, ""), name)
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
    """Of all neighbours that together are a token, those whose token has the highest score are merged first."""
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(vocab))
    if np.isnan(scores).any():
        raise UnsupportedModel("tokenizer.ggml.scores has a score that is no number")
    add_space = _get(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
    if (longest := max(map(len, vocab))) > LONGEST_PIECE:  # all ways to cut it in two are looked at
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
    merges = [tuple(merge.split(" ", 1)) for merge in _strings(metadata, "tokenizer.ggml.merges")]
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
    is_phi3 = any(name in _get(metadata, "general.name", str, "").lower() for name in ("phi-3", "phi3"))
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
        if _get(metadata, key, bool, default):
            if (i := ids[name]) is None:
                raise UnsupportedModel(f"{key} is true, but tokenizer.ggml.{name}_token_id is missing")
            used.append({"id": name, "ids": [i], "tokens": [tokens[i]]})
            single.insert(0 if name == "bos" else len(single), name)
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=used)


def _ends_of_turn(vocab: Mapping[str, int], types: np.ndarray) -> list[int]:
    # What a model was taught as text, such as HTML's </s>, ends no turn (in llama.cpp it does).
    known = [text for text in ENDS_OF_TURN if text in vocab]
    found = {text for text in known if types[vocab[text]] == CONTROL or text.startswith("<|")}
    if "<|end|>" in found and ({"<|return|>", "<|call|>"} <= found or {"<|flush|>", "<|calls|>"} <= found):
        found.remove("<|end|>")  # there it ends a message, and the turn goes on
    return [vocab[text] for text in found]


def _fill_marks(metadata: Mapping[str, Any], num_tokens: int) -> list[int]:
    """Ids of the marks before a prefix, a suffix and a middle; none unless the file names all three."""
    for names in FILL_NAMES:
        ids = [i for name in names if (i := _special_id(metadata, name, num_tokens)) is not None]
        if len(ids) == len(names):
            return ids
    return []


def _special_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id: int | None = _get(metadata, key, int, None)
    if token_id == NO_TOKEN or (token_id is not None and token_id >= num_tokens and name in UNUSED):
        return None
    if token_id is not None and not 0 <= token_id < num_tokens:
        raise UnsupportedModel(f"{key} is {token_id}: the file has {num_tokens} tokens, from 0 on")
    return token_id


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    keys = {f"tokenizer.chat_template.{name}": name for name in _strings(metadata, "tokenizer.chat_templates", [])}
    templates = {name: _get(metadata, key, str) for key, name in keys.items()}
    if (default := _get(metadata, "tokenizer.chat_template", str, None)) is not None:
        templates["default"] = default
    return templates


# ---- values


_MISSING = object()


def _get(metadata: Mapping[str, Any], key: str, kind: type, default: Any = _MISSING) -> Any:
    value = metadata.get(key, default)
    if value is _MISSING:
        raise UnsupportedModel(f"the GGUF file has no {key}; give the model's tokenizer.json with the option tokenizer")
    if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise UnsupportedModel(f"{key} is {shown(value)}: it must be of type {kind.__name__}")
    return value


def _strings(metadata: Mapping[str, Any], key: str, default: Any = _MISSING) -> list[str]:
    values: list[Any] = _get(metadata, key, list, default)
    if not {str}.issuperset(map(type, values)):
        wrong = next(value for value in values if type(value) is not str)
        raise UnsupportedModel(f"{key} has {shown(wrong)}: it must be a list of strings")
    return values


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if not tokens:
        raise UnsupportedModel("tokenizer.ggml.tokens is empty: a tokenizer needs tokens")
    if (size := sum(map(len, tokens))) > MAX_CHARS:
        raise UnsupportedModel(f"tokenizer.ggml.tokens has {size} characters: at most {MAX_CHARS} are read")
    return [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)] if "" in tokens else tokens


def _numbers(metadata: Mapping[str, Any], key: str, length: int, default: float | None = None) -> np.ndarray:
    """One number for each token."""
    values = metadata.get(key)
    if values is None and default is not None:
        return np.full(length, default)
    if not isinstance(values, np.ndarray) or values.shape != (length,):
        raise UnsupportedModel(f"{key} is {shown(values)}: it must have a number for each of {length} tokens")
    return values.astype(np.float64)
