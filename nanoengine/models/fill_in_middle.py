"""Fill in the middle: a prompt of a prefix and a suffix, with the special tokens of a code model (Bavarian et al., 2022,
https://arxiv.org/abs/2207.14255).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanoengine.errors import InvalidPrompt
from nanoengine.models.tokenizer import ModelTokenizer

NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek Coder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
    ("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)
"""The tokens before the prefix, the suffix and the middle. Without the last one, the order is suffix, prefix."""

FILE_NAMES = ("<|file_sep|>", "<file_sep>")
END_NAMES = ("<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<repo_name>", "<reponame>", "\u2581<EOT>")


@dataclass(frozen=True, slots=True)
class FillTokens:
    """The special tokens of a model.

    Attributes:
        prefix, suffix, middle: texts of the tokens before each part, as in `NAMES`.
        file: text of the token before the name and the text of another file; "": single files only.
        ends: ids of tokens that end the middle, beside the ends of a text.
    """

    prefix: str
    suffix: str
    middle: str
    file: str
    ends: tuple[int, ...]

    def prompt(self, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()) -> str:
        """The prompt of the middle.

        Args:
            prefix, suffix: the text before and after the middle.
            files: names and texts of other files for context.
        """
        others = "".join(f"{self.file}{name}\n{text}\n" for name, text in files)
        before, behind = self.prefix + prefix, self.suffix + suffix
        return others + (before + behind + self.middle if self.middle else behind + before)


def fill_tokens(tokenizer: ModelTokenizer) -> FillTokens:
    """The special tokens of a model: from its file, or of a known family by their texts.

    Raises:
        InvalidPrompt: the model has none.
    """

    def known(names: Sequence[str]) -> dict[str, int]:
        ids = ((name, tokenizer.fast.token_to_id(name)) for name in names if name)
        return {name: token for name, token in ids if token is not None}

    for names in (tokenizer.fill_token_names, *NAMES):
        marks = known(names)
        if marks and len(marks) == len([name for name in names if name]):
            files = known(FILE_NAMES)
            ends = {*marks.values(), *files.values(), *known(END_NAMES).values()}
            prefix, suffix, middle = names
            return FillTokens(prefix, suffix, middle, next(iter(files), ""), tuple(sorted(ends)))
    raise InvalidPrompt(
        "suffix",
        f" cannot be used: {tokenizer.name} has no tokens for filling in the middle, such as {NAMES[0][0]}: leave the suffix"
        " out, or use a model of code that was trained to fill",
    )
