"""The demo model's corpus: which standard library files it learns from, which it never sees, and its tokenizer.

Every script of this folder takes the split from here, so what is held out cannot differ between training and
measuring.  The split depends on module names and sizes alone, never on what a model makes of a file.
"""

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
VOCAB_SIZE = 4096
HELD_OUT_MODULES = 32
DEV_MODULES = 10
SMALLEST, LARGEST = 4_000, 80_000
# A word takes one leading space, dot or underscore; brackets and quotes stay apart from words, so that a prompt
# ending in "(" is cut into the same tokens as that text inside a file.
SPLIT = r"[ _.]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Left out everywhere: installed packages, generated tables and build settings, and deliberately broken sources.
SKIPPED_FOLDERS = {"site-packages", "__pycache__", "encodings", "pydoc_data", "data", "lib-dynload", "_vendor"}
SKIPPED_STARTS = ("_sysconfigdata", "bad_", "badsyntax", "entities", "tokenize_tests", "config-")
TEST_FOLDERS = {"test", "tests", "idle_test"}


@dataclass(frozen=True)
class Document:
    """One source file: its path relative to the library and its text."""

    path: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether the file tests the library rather than being part of it."""
        return bool(TEST_FOLDERS & set(Path(self.path).parts))


@dataclass(frozen=True)
class Split:
    """The three disjoint parts of the corpus."""

    train: list[Document]
    dev: list[Document]
    held_out: list[Document]


def standard_library() -> Path:
    """The running Python's standard library folder."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_documents(root: Path) -> list[Document]:
    """All usable `.py` files under `root` in path order: UTF-8, not empty, not noise, no exact duplicates."""
    documents: list[Document] = []
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS & set(parts[:-1]) or any(part.startswith(SKIPPED_STARTS) for part in parts):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if not text.strip() or text in seen or END in text or _is_table(text):
            continue
        seen.add(text)
        documents.append(Document("/".join(parts), text))
    return documents


def split(documents: Iterable[Document]) -> Split:
    """Hold out top-level modules by the order of their names' SHA-256 and keep their relatives out of training."""
    documents = list(documents)
    candidates = [d for d in documents if "/" not in d.path and SMALLEST <= len(d.text.encode()) <= LARGEST]
    candidates.sort(key=lambda d: hashlib.sha256(d.path.removesuffix(".py").encode()).hexdigest())
    held_out = candidates[:HELD_OUT_MODULES]
    dev = candidates[HELD_OUT_MODULES : HELD_OUT_MODULES + DEV_MODULES]
    chosen = {d.path: _telling_lines(d.text) for d in held_out + dev}
    names = {path.removesuffix(".py") for path in chosen}
    train = [
        d
        for d in documents
        if d.path not in chosen
        and not any(_related(d.path, name) for name in names)
        and not any(_copies(_telling_lines(d.text), lines) for lines in chosen.values())
    ]
    return Split(train, dev, held_out)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `VOCAB_SIZE` tokens that adds nothing to what it encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus is too small for a vocabulary of {VOCAB_SIZE}")
    return tokenizer


def _is_table(text: str) -> bool:
    """Whether a file is mostly numbers and escapes: long, and nothing to learn from."""
    return sum(c.isdigit() or c == "\\" for c in text) > 0.2 * len(text)


def _related(path: str, name: str) -> bool:
    """Whether `path` is a module's own test or its pure Python twin (`test_name*.py`, `_pyname.py`, ...)."""
    for part in (part.removesuffix(".py") for part in path.split("/")):
        plain = part.lstrip("_")
        if plain in (name, f"py{name}", f"{name}tester", f"{name}_tests") and (part != name or "test" in path):
            return True
        if plain == f"test_{name}" or plain.startswith(f"test_{name}_"):
            return True
    return False


def _telling_lines(text: str) -> set[str]:
    """The lines long enough that two files hardly share them by chance."""
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= 25}


def _copies(lines: set[str], kept_out: set[str]) -> bool:
    """Whether two files share over a fifth of the smaller one's telling lines, as forks of one module do."""
    smaller = min(len(lines), len(kept_out))
    return smaller >= 5 and len(lines & kept_out) > 0.2 * smaller
