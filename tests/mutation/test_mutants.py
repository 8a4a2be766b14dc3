"""The mutants fit the code as it is: each can be applied, and its tests exist."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.mutation.mutant import Mutant, read_mutants
from tests.mutation.running import CAUGHT, NOT_RUN, STALE, SURVIVED, Workplace, copy_checkout

ROOT = Path(__file__).parent.parent.parent
MUTANTS = [mutant for room in read_mutants().values() for mutant in room]


def test_every_mutant_applies_and_leaves_code_that_python_can_read() -> None:
    texts = {file: (ROOT / file).read_text() for file in {mutant.file for mutant in MUTANTS}}
    stale = []
    for mutant in MUTANTS:
        text = mutant.apply(texts[mutant.file])
        if text is None or text == texts[mutant.file]:
            stale.append(mutant.name)
        elif mutant.file.endswith(".py"):
            ast.parse(text, mutant.name)
    assert not stale, "the text to replace occurs not at all, or more than once"


def test_names_differ_and_tests_exist() -> None:
    names = Counter(mutant.name for mutant in MUTANTS)
    assert [name for name, count in names.items() if count > 1] == []
    missing = {test for mutant in MUTANTS for test in mutant.tests if not (ROOT / test.partition("::")[0]).exists()}
    assert missing == set()
    assert all(mutant.tests and mutant.breaks.endswith(".") for mutant in MUTANTS)


def test_a_mutant_is_caught_or_survives_or_does_not_apply(tmp_path: Path) -> None:
    (tmp_path / "limits.py").write_text("LIMIT = 3\n")
    (tmp_path / "test_limits.py").write_text("from limits import LIMIT\n\n\ndef test_limit():\n    assert LIMIT < 5\n")
    with Workplace(tmp_path, ("pytest", "hypothesis")) as workplace:

        def verdict(old: str, new: str, test: str = "test_limits.py") -> str:
            return workplace.run_mutant(Mutant("name", "limits.py", old, new, "It breaks.", (test,))).verdict

        assert verdict("3", "7") == CAUGHT
        assert verdict("3", "4") == SURVIVED
        assert verdict("8", "7") == STALE
        assert verdict("3", "(") == NOT_RUN
        assert verdict("3", "7", "test_missing.py") == NOT_RUN
        assert (tmp_path / "limits.py").read_text() == "LIMIT = 3\n"


def test_the_copy_has_the_files_of_the_checkout(tmp_path: Path) -> None:
    copy_checkout(ROOT, tmp_path)
    assert (tmp_path / "nanoengine" / "llm.py").read_bytes() == (ROOT / "nanoengine" / "llm.py").read_bytes()
    assert not (tmp_path / ".git").exists()
