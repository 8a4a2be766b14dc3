"""Fill in the middle: a prompt of the text before a hole and the text behind it, with the marks that a code model was trained on
(Bavarian et al., 2022, https://arxiv.org/abs/2207.14255).
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
"""The marks before the prefix, the suffix and the middle. Without the last, the suffix comes first, and the prefix behind it."""

FILE_NAMES = ("<|file_sep|>", "<file_sep>")
END_NAMES = ("<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<repo_name>", "<reponame>", "\u2581<EOT>")


@dataclass(frozen=True, slots=True)
class FillMarks:
    """What a model was trained on.

    Attributes:
        prefix, suffix, middle: texts of the tokens before each part, as in `NAMES`.
        file: text of the token before the name and the text of another file; "": it was trained on single files.
        ends: ids of tokens behind which nothing belongs to the middle, beside the ends of a text.
    """

    prefix: str
    suffix: str
    middle: str
    file: str
    ends: tuple[int, ...]

    def prompt(self, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()) -> str:
        """The text behind which the model writes the middle.

        Args:
            prefix, suffix: before and behind the hole.
            files: names and texts of other files that help to fill it.
        """
        others = "".join(f"{self.file}{name}\n{text}\n" for name, text in files)
        before, behind = self.prefix + prefix, self.suffix + suffix
        return others + (before + behind + self.middle if self.middle else behind + before)


def fill_marks(tokenizer: ModelTokenizer) -> FillMarks:
    """The marks of a model: those that its file names, or those of the families that are known by the texts of their tokens.

    Raises:
        InvalidPrompt: it has none.
    """

    def known(names: Sequence[str]) -> dict[str, int]:
        found = {name: tokenizer.fast.token_to_id(name) for name in names if name}
        return {name: token for name, token in found.items() if token is not None}

    for names in (tokenizer.fill_names, *NAMES):
        marks = known(names)
        if marks and len(marks) == len([name for name in names if name]):
            files = known(FILE_NAMES)
            ends = {*marks.values(), *files.values(), *known(END_NAMES).values()}
            prefix, suffix, middle = names
            return FillMarks(prefix, suffix, middle, next(iter(files), ""), tuple(sorted(ends)))
    raise InvalidPrompt(
        f"{tokenizer.name} has no tokens for filling in the middle, such as {NAMES[0][0]}: leave the suffix out, or take a model"
        " of code that was trained to fill"
    )
