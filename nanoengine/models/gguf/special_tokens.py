"""Special tokens in the metadata of a GGUF file: their ids, ends of a turn, and marks of fill-in-the-middle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nanoengine.errors import UnsupportedModel
from nanoengine.models.gguf.values import get

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of tokens (tokenizer.ggml.token_type). All but the first are matched in text before it is split."""

NAMES = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "sep": "seperator", "pad": "padding"}
"""Special tokens, and their names in the keys. The format spells the separator so."""

NO_TOKEN = (1 << 32) - 1
"""The id -1 as converters write it: there is no such token."""

UNUSED = ("seperator", "padding")
"""Special tokens that no prompt has: some files have ids for them that are outside the vocabulary."""

FILL_NAMES = (("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle"))
"""Names in the keys of the marks of `nanoengine/models/fill_in_middle.py`: those of today, and those of older files."""

ENDS_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>", "<eos>", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)
"""Texts of tokens that end a turn, as llama.cpp has it: many files name one of their ends only."""


def ends_of_turn(vocab: Mapping[str, int], types: np.ndarray) -> list[int]:
    """Ids of the tokens that end a turn by their text."""
    # A token of plain text, such as HTML's </s>, ends no turn (in llama.cpp it does).
    known = [text for text in ENDS_OF_TURN if text in vocab]
    ends = {text for text in known if types[vocab[text]] == CONTROL or text.startswith("<|")}
    if "<|end|>" in ends and ({"<|return|>", "<|call|>"} <= ends or {"<|flush|>", "<|calls|>"} <= ends):
        ends.remove("<|end|>")  # there it ends a message, and the turn goes on
    return [vocab[text] for text in ends]


def fill_marks(metadata: Mapping[str, Any], num_tokens: int) -> list[int]:
    """Ids of the marks before a prefix, a suffix and a middle; none unless the file names all three."""
    for names in FILL_NAMES:
        ids = [i for name in names if (i := special_id(metadata, name, num_tokens)) is not None]
        if len(ids) == len(names):
            return ids
    return []


def special_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    """The id of a special token, None if the file names none.

    Raises:
        UnsupportedModel: an id outside the vocabulary.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    token_id: int | None = get(metadata, key, int, None)
    if token_id == NO_TOKEN or (token_id is not None and token_id >= num_tokens and name in UNUSED):
        return None
    if token_id is not None and not 0 <= token_id < num_tokens:
        raise UnsupportedModel(f"{key} is {token_id}: the file has {num_tokens} tokens, from 0 on")
    return token_id
