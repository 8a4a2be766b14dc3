"""Hostile wishes for structured outputs, drawn: schemas, expressions and grammars that are wrong, deep, long, or take long."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Fields = dict[str, Any]


def size(rng: random.Random, most: int) -> int:
    """Mostly small, sometimes as much as that."""
    return max(1, int(most ** rng.random()))


def text(rng: random.Random) -> str:
    alphabet = 'abcxyz 019"\\/{}[]()<>|.*+?^$\n\t\0é語🦜\ud800-_:,#'
    return "".join(rng.choice(alphabet) for _ in range(rng.randrange(12)))


def value(rng: random.Random) -> Any:
    return rng.choice(
        [text(rng), -1, 0, 1.5, 10**30, -(2**63), 1e308, True, None, [], {}, [text(rng)], {"a": text(rng)}]
    )


def drawn_schema(rng: random.Random, depth: int = 4) -> Any:
    """Keywords as they come, with values that may be of no sense."""
    if depth == 0 or rng.random() < 0.1:
        return rng.choice(
            [True, {}, {"type": "string"}, {"enum": [1, "a"]}, {"$ref": "#"}, {"$ref": "#/$defs/a"}, value(rng)]
        )
    schema: Fields = {}
    for _ in range(rng.randrange(1, 5)):
        name = rng.choice(KEYWORDS)
        if rng.random() < 0.1:
            schema[name] = value(rng)
        elif name in ("properties", "patternProperties", "$defs", "dependentSchemas"):
            keys = [rng.choice(["a", "b", "^a", ".*", text(rng)]) for _ in range(rng.randrange(4))]
            schema[name] = {key: drawn_schema(rng, depth - 1) for key in keys}
        elif name in ("allOf", "anyOf", "oneOf", "prefixItems"):
            schema[name] = [drawn_schema(rng, depth - 1) for _ in range(rng.randrange(5))]
        elif name in ("items", "additionalProperties", "not", "if", "contains", "propertyNames"):
            schema[name] = drawn_schema(rng, depth - 1)
        elif name == "type":
            schema[name] = rng.choice(
                ["object", "array", "string", "integer", "number", "null", ["string", "object"], "x"]
            )
        elif name in ("enum", "required"):
            schema[name] = [value(rng) for _ in range(rng.randrange(4))]
        elif name == "pattern":
            schema[name] = drawn_regex(rng)
        elif name == "format":
            schema[name] = rng.choice(["date-time", "email", "uuid", "ipv6", "uri", "regex", text(rng)])
        else:
            schema[name] = rng.choice([0, 1, 7, -3, 0.1, 10**6, 2**70])
    return schema


KEYWORDS = (
    *(
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "prefixItems",
        "enum",
        "const",
        "pattern",
        "format",
    ),
    *(
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "multipleOf",
        "allOf",
    ),
    *(
        "anyOf",
        "oneOf",
        "not",
        "if",
        "$ref",
        "$defs",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "uniqueItems",
    ),
    *("contains", "dependentSchemas", "x-guidance", "$anchor", "$id", "definitions"),
)


def drawn_regex(rng: random.Random) -> str:
    found = rng.choice(
        ["a", ".", "[a-z]", r"\w", r"\p{L}", "(ab|cd)", "x*", r"\d+", "[^a]", "^", "$", r"\b", "(?=a)", text(rng)]
    )
    for _ in range(rng.randrange(6)):
        more = rng.choice([r"\s", "b?", ".*", "[0-9]", "(a|b)*a(a|b)", "é"])
        many = f"{{{rng.randrange(3)},{size(rng, 10**6)}}}"
        found = rng.choice(
            [f"({found})*", f"({found})?", f"({found}){many}", found + more, f"{found}|{more}", f"({found}{more})+"]
        )
    return found


def long_regex(rng: random.Random) -> str:
    part = rng.choice(["a?", ".?", "(a|b)", "a{1,99}", ".*x", "(", "[a-z]{9}", "a|", r"\p{L}"])
    return part * size(rng, 60_000 // len(part))


def drawn_grammar(rng: random.Random) -> str:
    rules = [f"r{i}" for i in range(size(rng, 60))]

    def part() -> str:
        one = rng.choice(
            [
                *rules,
                '"a"',
                '"b" ',
                "/[a-z]+/",
                "/.*x/",
                '""',
                "%json {}",
                '%json {"type": "array"}',
                "T",
                "<[0]>",
                "<[99999]>",
            ]
        )
        return one + rng.choice(["", "", "*", "+", "?", f"{{0,{size(rng, 10**5)}}}"])

    if rng.random() < 0.3:  # as llama.cpp has it
        body = " | ".join(
            " ".join(rng.choice(['"a"', "[a-z]", "root", "x", "(", ")", "[^", '"é"*']) for _ in range(4))
            for _ in range(3)
        )
        return f"root ::= {body}\nx ::= root? {rng.choice(['root', 'x', ''])}"
    lines = [
        f"{own}: " + " | ".join(" ".join(part() for _ in range(rng.randrange(4))) for _ in range(rng.randrange(1, 4)))
        for own in rules
    ]
    return "\n".join(
        ["start: r0", *lines, rng.choice(["T: /x{0,9999}y/", "T: T", "T: ~/(.*a.{9})/ & /(.*b.{5})/", text(rng)])]
    )


def chain(rng: random.Random) -> Fields:
    length = size(rng, 9000)
    links: list[Callable[[Fields], Any]] = [
        lambda to: to,
        lambda to: {"allOf": [to, {"minimum": 1}]},
        lambda to: {"allOf": [to, to]},
        lambda to: {"anyOf": [to, {"type": "array", "items": to}]},
        lambda to: {"properties": {"a": to}},
        lambda to: {"items": to, "minItems": 2},
    ]
    link = rng.choice(links)
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {
        "$defs": definitions | {f"d{length}": rng.choice([{"type": "integer"}, {"$ref": "#"}])},
        "$ref": "#/$defs/d0",
    }


def large_schema(rng: random.Random) -> Any:
    n = size(rng, 5000)
    names = [f"p{i}" for i in range(n)]
    optional = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    choices: list[Callable[[], Any]] = [
        lambda: optional,
        lambda: {**optional, "required": names, "additionalProperties": False},
        lambda: {"anyOf": [{"properties": {name: {"const": i}}, "required": [name]} for i, name in enumerate(names)]},
        lambda: {"enum": [f"{'x' * rng.randrange(50)}{i}" for i in range(n)]},
        lambda: {"const": "x" * 90 * n},
        lambda: {"const": [[i] * 20 for i in range(n)]},
        lambda: {"type": "string", "minLength": n**2, "maxLength": n**3, "pattern": drawn_regex(rng)},
        lambda: {"type": "array", "minItems": n**2, "items": drawn_schema(rng, 2)},
        lambda: {"type": "array", "prefixItems": [{"type": "integer"}] * n},
        lambda: {"type": rng.choice(["integer", "number"]), "multipleOf": rng.choice([n, n**2, 0.001 * n])},
        lambda: {"allOf": [{"type": "integer", "multipleOf": own} for own in (2, 3, 5, 7, 11, 13, 17)[: n % 8]]},
        lambda: {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(3)]} for i in range(n % 40)]},
        lambda: {"patternProperties": {f"^{rng.choice('ab')}{name}.*$": {"type": "integer"} for name in names}},
        lambda: {"type": "integer", "minimum": -(n**4), "maximum": n**5},
        lambda: chain(rng),
    ]
    return rng.choice(choices)()


def drawn(rng: random.Random) -> Fields:
    """The fields of one request that say what its text must look like."""
    wishes: list[Callable[[], Fields]] = [
        lambda: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": drawn_schema(rng)}}},
        lambda: {"structured_outputs": {"json": drawn_schema(rng, 6)}},
        lambda: {"structured_outputs": {"json": large_schema(rng), "disable_any_whitespace": rng.random() < 0.5}},
        lambda: {"json_schema": large_schema(rng)},
        lambda: {"structured_outputs": {"regex": drawn_regex(rng)}},
        lambda: {"structured_outputs": {"regex": long_regex(rng)}},
        lambda: {"structured_outputs": {"json": {"type": "object"}, "whitespace_pattern": drawn_regex(rng)}},
        lambda: {"grammar": drawn_grammar(rng)},
        lambda: {
            "structured_outputs": {
                "grammar": rng.choice(["start: ", "root ::= "]) + "(" * (n := size(rng, 20_000)) + '"a"' + ")" * n
            }
        },
        lambda: {"structured_outputs": {"choice": [text(rng) for _ in range(size(rng, 5000))]}},
        lambda: {"structured_outputs": {"structural_tag": tag(rng)}},
        lambda: {"structured_outputs": value(rng)},
        lambda: {"response_format": {"type": rng.choice(["json_object", "json_schema", "x"]), "schema": value(rng)}},
    ]
    return rng.choice(wishes)()


def tag(rng: random.Random) -> Any:
    structures = [
        {"begin": f"<{text(rng)}{i}", "schema": drawn_schema(rng, 2), "end": text(rng)} for i in range(size(rng, 400))
    ]
    return {"structures": structures, "triggers": [rng.choice(["<", "", text(rng)])]}


def wish(seed: int, number: int) -> Fields:
    """The body of a request for a completion."""
    rng = random.Random(f"{seed} {number}")
    return {"prompt": "x = ", "max_tokens": rng.choice([1, 8, 32]), "seed": number, **drawn(rng)}
