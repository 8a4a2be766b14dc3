"""BFCL v4: does every function of the Berkeley function-calling leaderboard compile, and does every forced call validate?

python -m benchmarks.proofs.bfcl FOLDER [--calls 500] [--seed 0] [--model demo]

FOLDER is the unpacked wheel of bfcl_eval (https://pypi.org/project/bfcl-eval). BFCL writes types of its own, such as "dict",
"float" and "tuple"; they are translated by its own table, GORILLA_TO_OPENAPI, as its handlers of models with OpenAI's interface
do it: a type that is not in the table, and none at all, is "string". Here that is done at every depth, not for the first few
levels only. Nothing else is changed. A function is counted once, however many questions have it.

A forced call is {"name": ..., "arguments": ...} by the parameters of a function, at temperature 1. It is held against the
same schema by the library jsonschema, which is not a dependency of the project. A model may also write on to --max-tokens: such
a call is counted, and is no call. Ends with 1 if a call that ended does not validate.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.proofs.acceptance import Acceptance, reason
from nanoengine import LLM, SamplingParams
from nanoengine.errors import InvalidSamplingParams


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with bfcl_eval in it")
    parser.add_argument("--calls", type=int, default=500, help="forced calls (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=1000, help="of a call (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    package = args.folder / "bfcl_eval"
    types = runpy.run_path(str(package / "constants" / "type_mappings.py"))["GORILLA_TO_OPENAPI"]
    acceptance, good, reasons = Acceptance(args.model), [], Counter[str]()
    functions = list(distinct(package / "data"))
    for function in functions:
        call = call_schema(function, types)
        try:
            acceptance.outputs(call)
            good.append(call)
        except InvalidSamplingParams as error:
            reasons[reason(str(error))] += 1
            print(f"{function['name']}: {error}")
    print(f"{len(functions)} functions, {len(good)} compile; refused: {dict(reasons) or 'none'}")
    return int(force(args, good) > 0)


def distinct(data: Path) -> Iterator[dict[str, Any]]:
    """Every function of every question, once."""
    seen: set[str] = set()
    for path in [*sorted(data.glob("BFCL_v4_*.json")), *sorted((data / "multi_turn_func_doc").glob("*.json"))]:
        if path.stem == "BFCL_v4_format_sensitivity":  # names of questions only
            continue
        for line in path.read_text("utf-8").splitlines():
            entry = json.loads(line)
            for function in [entry] if "parameters" in entry else entry.get("function", []):
                key = json.dumps([function["name"], function["parameters"]])
                if key not in seen:
                    seen.add(key)
                    yield function


def call_schema(function: dict[str, Any], types: dict[str, str]) -> dict[str, Any]:
    arguments = function["parameters"] | {"type": "object"}
    arguments["properties"] = {name: translated(own, types) for name, own in arguments["properties"].items()}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def translated(schema: dict[str, Any], types: dict[str, str]) -> dict[str, Any]:
    """A schema with JSON's types."""
    found = schema | {"type": types.get(schema.get("type", ""), "string")}
    if isinstance(found.get("properties"), dict):
        found["properties"] = {name: translated(own, types) for name, own in found["properties"].items()}
    for name in ("items", "additionalProperties"):
        if isinstance(found.get(name), dict):
            found[name] = translated(found[name], types)
    return found


def force(args: argparse.Namespace, schemas: list[dict[str, Any]]) -> int:
    """Has a model make calls; returns how many of those that ended are not valid."""
    validator: Any = importlib.import_module("jsonschema").Draft202012Validator
    drawn = random.Random(args.seed).choices(schemas, k=args.calls)
    params = [
        SamplingParams(seed=number, temperature=1.0, max_tokens=args.max_tokens, structured_outputs={"json": own})
        for number, own in enumerate(drawn)
    ]
    with LLM(args.model, max_model_len=args.max_tokens + 100, use_tqdm=False) as llm:
        outputs = llm.generate(["def call(" for _ in drawn], params)
    counts = Counter[str]()
    for schema, output in zip(drawn, outputs, strict=True):
        [completion] = output.outputs
        if completion.finish_reason != "stop":
            counts[f"ended by {completion.finish_reason}"] += 1
            continue
        errors = [own.message for own in validator(schema).iter_errors(json.loads(completion.text))]
        counts["not valid" if errors else "valid"] += 1
        if errors:
            print(f"{completion.text[:200]}\n    {errors[0][:200]}")
    print(f"{args.calls} forced calls: {dict(counts)}")
    return counts["not valid"]


if __name__ == "__main__":
    sys.exit(main())
