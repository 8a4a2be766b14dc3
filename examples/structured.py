"""Answers that are objects: a class of pydantic is the schema, and what the model writes is one of its objects.

python examples/structured.py [MODEL]     needs: pip install pydantic

The bundled model has learned code and no conversation: its objects are valid, and say little. smollm2 says more.
"""

import sys
from typing import Literal

from nanoengine import LLM, SamplingParams

try:
    from pydantic import BaseModel, ConfigDict, Field
except ImportError:
    sys.exit("This example needs pydantic: pip install pydantic")


class Step(BaseModel):
    model_config = ConfigDict(extra="forbid")  # without it there may be other properties, too
    action: Literal["chop", "boil", "fry", "bake"]
    minutes: int = Field(ge=1, le=120)


class Recipe(BaseModel):
    """Bounds keep a model that knows no end from writing on until `max_tokens`."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=40)
    vegetarian: bool
    steps: list[Step] = Field(min_length=1, max_length=4)


model = sys.argv[1] if len(sys.argv) > 1 else "demo"
asked = "A recipe for tomato soup, as JSON: "

with LLM(model, max_model_len=1024, use_tqdm=False) as llm:
    for seed in (1, 2):
        params = SamplingParams(seed=seed, max_tokens=400, structured_outputs={"json": Recipe.model_json_schema()})
        steps = llm.metrics.steps.num_decode_steps
        completion = llm.generate(asked, params, use_tqdm=False)[0].outputs[0]
        recipe = Recipe.model_validate_json(completion.text)
        steps = llm.metrics.steps.num_decode_steps - steps
        print(f"{completion.text}\n  {recipe.name!r}: {sum(step.minutes for step in recipe.steps)} minutes")
        print(f"  {len(completion.token_ids)} tokens in {steps} steps: what the schema forces are drafts")
    for outputs in ({"choice": ["yes", "no"]}, {"regex": r"[1-9][0-9]? (grams|litres)"}):
        params = SamplingParams(seed=1, structured_outputs=outputs)
        print(outputs, "->", llm.generate("Tomatoes in it: ", params, use_tqdm=False)[0].outputs[0].text)
