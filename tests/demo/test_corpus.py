"""What the demo model learns from and what it never sees: the split holds, whatever the standard library holds."""

from __future__ import annotations

from benchmarks.demo_model.corpus import DEV_MODULES, HELD_OUT_MODULES, Document, split
from benchmarks.demo_model.measure import windows


def module(name: str, size: int = 5000) -> Document:
    line = f"def {name.replace('/', '_')}_{{}}(argument_of_this_module): pass\n"
    text = "".join(line.format(i) for i in range(size // 40))[:size]
    return Document(f"{name}.py", text)


LIBRARY = [module(f"module{i}") for i in range(60)]


def test_the_parts_are_disjoint_and_of_the_promised_size() -> None:
    parts = split(LIBRARY)
    paths = [{d.path for d in part} for part in (parts.train, parts.dev, parts.held_out)]
    assert [len(part) for part in paths] == [60 - HELD_OUT_MODULES - DEV_MODULES, DEV_MODULES, HELD_OUT_MODULES]
    assert HELD_OUT_MODULES >= 25
    assert len(set.union(*paths)) == 60


def test_the_split_depends_on_names_and_not_on_order_or_content() -> None:
    other = [Document(d.path, d.text.replace("pass", "...") + "\n" * 9) for d in reversed(LIBRARY)]
    assert [d.path for d in split(LIBRARY).held_out] == [d.path for d in split(other).held_out]


def test_tests_twins_and_copies_of_a_held_out_module_are_not_trained_on() -> None:
    held_out = split(LIBRARY).held_out[0]
    name = held_out.path.removesuffix(".py")
    relatives = [
        Document(f"test/test_{name}.py", "a = 1\n" * 900),
        Document(f"test/test_{name}_more.py", "b = 1\n" * 900),
        Document(f"_py{name}.py", "c = 1\n" * 100),
        Document("package/fork.py", held_out.text[: len(held_out.text) // 2]),
    ]
    stranger = Document("package/stranger.py", "d = 1\n" * 900)
    trained = {d.path for d in split([*LIBRARY, *relatives, stranger]).train}
    assert stranger.path in trained
    assert not trained & {d.path for d in relatives}


def test_windows_score_every_token_once_and_with_context() -> None:
    for count in (1, 2, 10, 11, 25, 100):
        scored = []
        for start, stop, first in windows(count, length=10, overlap=4):
            assert start < first < stop <= start + 10
            assert first - start >= min(4, first)
            scored += range(first, stop)
        assert scored == list(range(1, count))
