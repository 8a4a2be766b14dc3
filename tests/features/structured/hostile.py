"""Hostile wishes for structured outputs, drawn: schemas, expressions and grammars that are wrong, deep, long, or take long."""

from __future__ import annotations

import random
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
        name = rng.choice(KEYWORDS.split())
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


KEYWORDS = """
    type properties required additionalProperties items prefixItems enum const pattern format minLength maxLength minItems
    maxItems minimum maximum exclusiveMinimum multipleOf allOf anyOf oneOf not if $ref $defs patternProperties propertyNames
    minProperties uniqueItems contains dependentSchemas x-guidance $anchor $id definitions
"""


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


def drawn_grammar(rng: random.Random) -> str:
    rules = [f"r{i}" for i in range(size(rng, 60))]
    parts = [*rules, '"a"', '"b" ', "/[a-z]+/", "/.*x/", '""', "%json {}", "T", "<[0]>", "<[99999]>"]

    def alternative() -> str:
        many = ["", "", "*", "+", "?", f"{{0,{size(rng, 10**5)}}}"]
        return " ".join(rng.choice(parts) + rng.choice(many) for _ in range(rng.randrange(4)))

    lines = [f"{own}: {' | '.join(alternative() for _ in range(rng.randrange(1, 4)))}" for own in rules]
    terminal = rng.choice(["T: /x{0,9999}y/", "T: T", "T: ~/(.*a.{9})/ & /(.*b.{5})/", text(rng)])
    return "\n".join(["start: r0", *lines, terminal])


def large_schema(rng: random.Random) -> Any:
    n = size(rng, 5000)
    names = [f"p{i}" for i in range(n)]
    choices: list[Fields] = [
        {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names},
        {"anyOf": [{"properties": {name: {"const": i}}, "required": [name]} for i, name in enumerate(names)]},
        {"const": [[i] * 20 for i in range(n)]},
        {"type": "string", "minLength": n**2, "maxLength": n**3, "pattern": drawn_regex(rng)},
        {"type": "array", "minItems": n**2, "items": drawn_schema(rng, 2)},
        {"type": rng.choice(["integer", "number"]), "multipleOf": rng.choice([n, n**2, 0.001 * n])},
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(3)]} for i in range(n % 40)]},
        {"$defs": {f"p{i}": {"allOf": [{"$ref": f"#/$defs/p{i + 1}"}, {}]} for i in range(n)}, "$ref": "#/$defs/p0"},
    ]
    return rng.choice(choices)


def drawn(rng: random.Random) -> Fields:
    """The fields of one request that say what its text must look like."""
    schema, deep = rng.choice([drawn_schema(rng, 6), large_schema(rng)]), size(rng, 20_000)
    structured: list[Fields] = [
        {"json": schema, "disable_any_whitespace": rng.random() < 0.5},
        {"json": {"type": "object"}, "whitespace_pattern": drawn_regex(rng)},
        {"regex": drawn_regex(rng)},
        {"regex": rng.choice(["a?", ".?", "(a|b)", "a{1,99}", ".*x", "(", "a|"]) * size(rng, 15_000)},
        {"grammar": rng.choice(["start: ", "root ::= "]) + "(" * deep + '"a"' + ")" * deep},
        {"choice": [text(rng) for _ in range(size(rng, 5000))]},
        {"structural_tag": tag(rng)},
    ]
    wishes: list[Fields] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"response_format": {"type": rng.choice(["json_object", "json_schema", "x"]), "schema": value(rng)}},
        {"json_schema": schema},
        {"grammar": drawn_grammar(rng)},
        {"structured_outputs": value(rng)},
        *({"structured_outputs": own} for own in structured),
    ]
    return rng.choice(wishes)


def tag(rng: random.Random) -> Any:
    structures = [
        {"begin": f"<{text(rng)}{i}", "schema": drawn_schema(rng, 2), "end": text(rng)} for i in range(size(rng, 400))
    ]
    return {"structures": structures, "triggers": [rng.choice(["<", "", text(rng)])]}


def wish(seed: int, number: int) -> Fields:
    """The body of a request for a completion."""
    rng = random.Random(f"{seed} {number}")
    return {"prompt": "x = ", "max_tokens": rng.choice([1, 8, 32]), "seed": number, **drawn(rng)}
