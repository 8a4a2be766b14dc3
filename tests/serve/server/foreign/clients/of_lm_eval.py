"""What people measure with lm-eval: texts and log likelihoods of a model that is served."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from checks import KEY, MODEL, URL, check, refuses
from lm_eval.tasks import TaskManager

QUESTIONS = (("The capital of France is", [" Paris", " nine"]), ("One, two, three,", [" four", " cat"]))


def scores(client: str, path: str, output_type: str, **arguments: Any) -> dict[str, float]:
    """Of a task over questions of ours."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "questions.json")
        data.write_text("\n".join(json.dumps({"text": text, "choices": own, "answer": 0}) for text, own in QUESTIONS))
        asks = {
            "multiple_choice": "doc_to_choice: '{{choices}}'\ndoc_to_target: answer\ntarget_delimiter: ''\n"
            "metric_list: [{metric: acc}]\n",
            "loglikelihood_rolling": "doc_to_target: '{{text}}'\nmetric_list: [{metric: word_perplexity}]\n",
            "generate_until": "doc_to_target: '{{choices[0]}}'\ngeneration_kwargs: {until: [\"\\n\"], max_gen_toks: 8}\n"
            "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n",
        }
        Path(folder, "own.yaml").write_text(
            f"task: own\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
            f"output_type: {output_type}\ndoc_to_text: '{'' if 'rolling' in output_type else '{{text}}'}'\n{asks[output_type]}"
        )
        model = {
            "model": MODEL,
            "base_url": f"{URL}/{path}",
            "max_retries": 1,
            "num_concurrent": 1,
            "auth_token": KEY,
            **arguments,
        }
        result = lm_eval.simple_evaluate(
            model=client,
            model_args=model,
            tasks=["own"],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            bootstrap_iters=0,
            apply_chat_template="chat" in client,
        )
        return {name: value for name, value in result["results"]["own"].items() if isinstance(value, float)}


@check("lm_eval", "`local-completions`: choices, by their log likelihoods")
def choices() -> None:
    assert scores("local-completions", "completions", "multiple_choice", tokenizer_backend="remote")["acc,none"] == 1


@check("lm_eval", "`local-completions`: the perplexity of texts")
def rolling() -> None:
    found = scores("local-completions", "completions", "loglikelihood_rolling", tokenizer_backend="remote")
    assert 1 < found["word_perplexity,none"] < 1e4


@check("lm_eval", "`local-completions` and `local-chat-completions`: texts")
def texts() -> None:
    assert scores("local-completions", "completions", "generate_until", tokenizer_backend="remote")
    assert scores("local-chat-completions", "chat/completions", "generate_until", tokenizer_backend=None)


refuses("lm_eval", "another model", Exception, "404")(
    lambda: scores("local-completions", "completions", "generate_until", tokenizer_backend=None, model="gpt-9")
)
