"""Mutants of what users touch first: LLM, options, sampling parameters, chats, tokenizer, the command."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

LLM = "nanoengine/llm.py"
CORE_LLM = "nanoengine/core/llm.py"
OPTIONS = "nanoengine/core/options.py"
CONFIG = "nanoengine/core/config.py"
PARAMS = "nanoengine/core/sampling_params.py"
CHAT = "nanoengine/models/chat_template.py"
TOKENIZER = "nanoengine/models/tokenizer.py"
CLI = "nanoengine/serve/cli.py"
SESSION = "nanoengine/serve/chat/session.py"
TEST_SESSION = "tests/serve/chat/test_session.py"
TEST_LLM = "tests/e2e/test_front_door.py"
TEST_PARAMS = "tests/features/sampling/test_params.py"
TEST_CORE = "tests/core/test_llm.py"

MUTANTS = (
    Mutant(
        "list-of-ids-is-many-prompts",
        CORE_LLM,
        "    if prompts and isinstance(prompts[0], int):\n        return [cast(Prompt, prompts)]\n",
        "",
        "A list of token ids is taken for a list of prompts.",
        (TEST_CORE,),
    ),
    Mutant(
        "interrupted-requests-run-on",
        CORE_LLM,
        "            for request in requests:\n                self.engine.abort(request.request_id)\n",
        "            pass\n",
        "After Ctrl-C in generate, its requests stay in the engine.",
        ("tests/e2e/test_endings.py",),
    ),
    Mutant(
        "closed-stream-runs-on",
        LLM,
        "            with self._interrupts:\n                self.engine.abort(request.request_id)\n",
        "            pass\n",
        "A stream that is closed early leaves its request in the engine.",
        (TEST_LLM,),
    ),
    Mutant(
        "failed-requests-go-unnoticed",
        CORE_LLM,
        "        if errors:\n            raise StepFailed",
        "        if False:\n            raise StepFailed",
        "generate returns the results of failed requests as if nothing was wrong.",
        ("tests/e2e/test_failures.py",),
    ),
    Mutant(
        "params-of-the-wrong-number-pass",
        CORE_LLM,
        "if len(params) != count:",
        "if len(params) < count:",
        "More sampling parameters than prompts are taken, and the rest is dropped.",
        ("tests/e2e/test_bad_input.py",),
    ),
    Mutant(
        "stream-takes-several-completions",
        LLM,
        "if (count := request.params.num_sequences) != 1:",
        "if False:",
        "A stream of several completions yields the first, and computes all.",
        ("tests/e2e/test_bad_input.py",),
    ),
    Mutant(
        "option-may-be-zero",
        OPTIONS,
        "    low: float = 1,",
        "    low: float = 0,",
        "Options that count something may be 0.",
        ("tests/test_config.py",),
    ),
    Mutant(
        "option-has-no-upper-end",
        OPTIONS,
        "is_right and low <= value <= high and",
        "is_right and low <= value and",
        "Options are larger than the layers below can hold.",
        ("tests/test_config.py",),
    ),
    Mutant(
        "pool-has-two-sizes",
        CONFIG,
        "if self.num_kv_blocks is not None and self.kv_cache_memory is not None:",
        "if False:",
        "num_kv_blocks and kv_cache_memory are both taken, and one is dropped.",
        ("tests/test_config.py",),
    ),
    Mutant(
        "share-may-be-zero",
        CONFIG,
        "option(0.9, 0, 1, above=True)",
        "option(0.9, 0, 1)",
        "The share of the GPU's memory may be 0.",
        ("tests/test_config.py",),
    ),
    Mutant(
        "unknown-option-is-not-named",
        "nanoengine/core/errors.py",
        'if near else ""',
        'if False else ""',
        "The message for a misspelt option does not say which was meant.",
        ("tests/test_config.py",),
    ),
    Mutant(
        "top-p-of-zero-is-drawn",
        PARAMS,
        "if self.top_p > 1e-30 else 0.0",
        "if self.top_p > 0 else 0.0",
        "A top_p that is 0 in float32 keeps no token.",
        (TEST_PARAMS,),
    ),
    Mutant(
        "nan-passes-for-a-temperature",
        OPTIONS,
        "is_right and low <= value <= high and",
        "is_right and not (value < low or value > high) and",
        "NaN is accepted where a number within bounds is asked for.",
        (TEST_PARAMS,),
    ),
    Mutant(
        "bool-passes-for-an-integer",
        OPTIONS,
        " and not isinstance(value, bool))",
        ")",
        "True is accepted where an integer is asked for.",
        (TEST_PARAMS,),
    ),
    Mutant(
        "min-tokens-passes-max-tokens",
        "nanoengine/features/sampling/params.py",
        "if self.max_tokens is not None and self.min_tokens > self.max_tokens:",
        "if False:",
        "min_tokens may be more than max_tokens.",
        (TEST_PARAMS,),
    ),
    Mutant(
        "best-of-below-n-passes",
        "nanoengine/features/sampling/params.py",
        "if self.best_of is not None and self.best_of < self.n:",
        "if False:",
        "Fewer completions are made than n asks for.",
        (TEST_PARAMS,),
    ),
    Mutant(
        "beams-have-no-upper-end",
        "nanoengine/features/beam_search/params.py",
        "if count > MAX_CANDIDATES:",
        "if False:",
        "A beam search looks at more candidates than are computed.",
        ("tests/features/beam_search/test_params.py",),
    ),
    Mutant(
        "template-reaches-objects",
        CHAT,
        "_compiled(template).render(_plain(values))",
        "_compiled(template).render(values)",
        "A chat template gets Python objects with methods, and not copies of plain values.",
        ("tests/models/test_chat_template.py",),
    ),
    Mutant(
        "continued-message-is-closed",
        CHAT,
        "return _cut_at_mark(text) if continue_final_message else text",
        'return text.replace(MARK, "")',
        "A message that the model is to go on with is closed by the template.",
        ("tests/models/test_chat_template.py",),
    ),
    Mutant(
        "special-tokens-are-added-always",
        TOKENIZER,
        "self.fast.encode_batch, [text], add_special_tokens=add_special_tokens)[0].ids",
        "self.fast.encode_batch, [text])[0].ids",
        "A rendered chat gets a second first-of-text token.",
        ("tests/models/test_tokenizer.py",),
    ),
    Mutant(
        "tool-template-is-not-chosen",
        TOKENIZER,
        'name = "tool_use" if with_tools and "tool_use" in templates else "default"',
        'name = "default"',
        "A model's own template for tools is not used.",
        ("tests/models/test_tokenizer.py",),
    ),
    Mutant(
        "user-error-ends-well",
        CLI,
        '    except NanoEngineError as error:\n        _tell(f"nanoengine: {type(error).__name__}: {error}")\n        return 1\n',
        '    except NanoEngineError as error:\n        _tell(f"nanoengine: {type(error).__name__}: {error}")\n        return 0\n',
        "The command ends with status 0 after an error.",
        ("tests/serve/test_cli.py",),
    ),
    Mutant(
        "reset-forgets-the-system-message",
        SESSION,
        "        self.messages, self.num_left_out = [], 0\n\n",
        '        self.messages, self.num_left_out, self.system = [], 0, ""\n\n',
        "/reset forgets the system message too.",
        (TEST_SESSION,),
    ),
    Mutant(
        "stopped-answer-is-forgotten",
        SESSION,
        "        self.messages = [*asked, said]\n",
        "",
        "What was said before an answer was stopped is no part of the conversation.",
        (TEST_SESSION,),
    ),
    Mutant(
        "advice-loses-to-what-suits-small-models",
        "nanoengine/models/advice.py",
        "WITHOUT_ADVICE | found",
        "found | WITHOUT_ADVICE",
        "What the model's makers advise is overwritten where they advise no temperature.",
        ("tests/models/test_advice.py",),
    ),
)
