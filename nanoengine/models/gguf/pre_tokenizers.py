"""Pre-tokenizers: patterns that split text before the merges of a byte-level BPE, by the names in `tokenizer.ggml.pre`.

A GGUF file has only the name. The patterns are those in the tokenizer.json of the models; where no model has one, as for the name
`default`, those of llama.cpp (src/llama-vocab.cpp, llm_tokenizer_bpe).
"""

# ruff: noqa: RUF001 (these patterns are about characters that look like others)

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from nanoengine.errors import UnsupportedModel, shown

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str, *, contraction: str = _CONTRACTION + "|", ends: str = r"[\r\n]*") -> str:
    return rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_SIGNS}{ends}|{_LINES_AND_SPACES}"


def _cased_words(
    digits: str, contraction: str, *, upper: str = _UPPER, lower: str = _LOWER, ends: str = r"[\r\n/]*"
) -> str:
    """Words that also end where a small letter is followed by a capital."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{start}{upper}*{lower}+{contraction}|{start}{upper}+{lower}*{contraction}|"
        rf"{digits}|{_SIGNS}{ends}|{_LINES_AND_SPACES}"
    )


_DEEPSEEK_LETTERS = (  # the cased letters of scripts that have them, by an older Unicode; some have lookalikes
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛ"
    "ὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-"
    "ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_NOT_HAN = {"upper": rf"{_UPPER[:-1]}&&[^\p{{Han}}]]", "lower": rf"{_LOWER[:-1]}&&[^\p{{Han}}]]"}
_EAST_ASIAN = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
_HAN_AND_MORE = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _LINES_AND_SPACES
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The pre-tokenizer of a name in `tokenizer.ggml.pre`.

    Attributes:
        patterns: each cuts the pieces of the one before into what it matches and what lies between.
        ignore_merges: a piece that is a token is that token, whether or not merges lead there.
        add_bos: prompts begin with the first-of-text token, unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer of the library. Tokens are spelled in GPT-2's letters for bytes."""
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns
        ]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_KINDS = {
    # Without a name: files from before names, cut as llama.cpp cuts them.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat mellum a.x-4.0 "
    "jina-es jina-de jina-v2-es jina-v2-de modern-bert": PreTokenizer((_GPT2,)),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer(
        (_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_words(r"\p{N}{1,3}"),)),
    "glm4 glm5": PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True),
    # Those of BailingMoE are spelled otherwise, and match the same.
    "qwen2 deepseek-r1-qwen stablelm2 hunyuan solar-open megrez kormo grok-2 f2llmv2 "
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((_words(r"\p{N}"),)),
    "seed-coder": PreTokenizer((_words(r"\p{N}", ends=""),)),
    "ufakzeka": PreTokenizer((_words(r"\p{N}", contraction=""),)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _words(r"\p{N}"))),
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
            rf"{_SIGNS}[\r\n/]?|{_LINES_AND_SPACES}",
        )
    ),
    "qwen35": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
            rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}",
        )
    ),
    "tekken": PreTokenizer((_cased_words(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
    "youtu": PreTokenizer((_EAST_ASIAN, _cased_words(r"\p{N}", _CONTRACTION + "?")), ignore_merges=True),
    "kimi-k2": PreTokenizer(
        (r"\p{Han}+|" + _cased_words(r"\p{N}{1,3}", _CONTRACTION + "?", ends=r"[\r\n]*", **_NOT_HAN),)
    ),
    "tiny_aya cohere2moe": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _cased_words(r"\p{N}{1,3}", _CONTRACTION + "?"))),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "bloom poro-chat gpt3-finnish": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "viking": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
    "gpt-4o llama4 kanana2 minimax-m2 talkie": PreTokenizer((_cased_words(r"\p{N}{1,3}", _CONTRACTION + "?"),)),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _HAN_AND_MORE, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_MORE, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3_WORDS)),
}

_BY_NAME = {name: kind for names, kind in _KINDS.items() for name in names.split()}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of a name.

    Raises:
        UnsupportedModel: a name that is not in the table.
    """
    if name not in _BY_NAME:
        raise UnsupportedModel(
            f"tokenizer.ggml.pre is {shown(name)}, which this engine does not know: it knows {', '.join(sorted(_BY_NAME))};"
            " give the model's tokenizer.json with the option tokenizer"
        )
    return _BY_NAME[name]
