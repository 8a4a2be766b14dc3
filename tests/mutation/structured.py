"""Mutants of structured outputs."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

STRUCTURED = "nanoengine/features/structured/structured.py"
GRAMMARS = "nanoengine/features/structured/grammars.py"
EVERY_WAY = "tests/features/structured/test_every_way.py"
TEST_ENDINGS = "tests/features/structured/test_endings.py"
TEST_GRAMMARS = "tests/features/structured/test_grammars.py"
TEST_PARAMS = "tests/features/structured/test_params.py"
TEST_CALLS = "tests/models/tools/test_grammar.py"
TEST_HARMONY = "tests/models/tools/test_harmony.py"
TEST_XML = "tests/models/tools/test_xml_grammar.py"
TEST_PARSER = "tests/models/tools/test_parser.py"
TEST_TRIAL = "tests/features/structured/test_trial.py"
TRIAL = "nanoengine/features/structured/trial.py"

MUTANTS = (
    Mutant(
        "verdicts-are-of-the-grammar-before",
        TRIAL,
        "if number != self._number:",
        "if False:",
        "Where the process that compiles answers twice, all later verdicts are of the grammar before.",
        (TEST_TRIAL,),
    ),
    Mutant(
        "whoever-is-killed-is-to-blame",
        TRIAL,
        "MAX_TRIES = 2",
        "MAX_TRIES = 1",
        "A grammar is refused because somebody has killed the process that compiles it.",
        (TEST_TRIAL,),
    ),
    Mutant(
        "grammars-outlive-their-engine",
        STRUCTURED,
        "        self.grammars.close()\n",
        "",
        "The process that compiles grammars stays behind when the engine is closed.",
        ("tests/e2e/test_endings.py",),
    ),
    Mutant(
        "a-grammar-is-read-while-its-mask-is-filled",
        STRUCTURED,
        "if not self.constraints or isinstance(result, BaseException):",
        "if not self.constraints:",
        "Behind a failed step, a grammar is read that the thread for masks uses for the next one.",
        (TEST_ENDINGS,),
    ),
    Mutant(
        "schemas-are-looked-at-without-end",
        "nanoengine/models/tools/xml_grammar.py",
        "        self.kinds.left -= count\n",
        "",
        "Schemas that refer to each other make a grammar of as many values as there are ways through them.",
        (TEST_XML,),
    ),
    Mutant(
        "constrained-sequences-overlap",
        STRUCTURED,
        "return (seq for seq in self.constraints if seq.phase is Phase.DECODING and not seq.has_all_tokens)",
        "return ()",
        "With two steps in flight, the mask of a token is made before the token in front of it is known.",
        (EVERY_WAY,),
    ),
    Mutant(
        "grammar-in-error-allows-an-end",
        STRUCTURED,
        "                bits[first : first + 1 + len(drafts)] = 0\n",
        "                pass\n",
        "A text whose grammar has become too complex ends as if it were complete.",
        (TEST_ENDINGS,),
    ),
    Mutant(
        "complete-text-goes-on",
        STRUCTURED,
        "seq.stop_token_ids |= set(self.grammars.eos_token_ids)",
        "seq.stop_token_ids |= set()",
        "With ignore_eos a text goes on behind the end of its grammar.",
        (TEST_ENDINGS,),
    ),
    Mutant(
        "masks-are-left-out",
        "nanoengine/features/structured/masks.py",
        "return np.array([number for number, row in enumerate(rows.tolist()) if row in self.pieces], np.int64)",
        "return np.zeros(0, np.int64)",
        "Nothing is masked.",
        (TEST_ENDINGS,),
    ),
    Mutant(
        "forbidden-guesses-are-verified",
        "nanoengine/features/structured/constraint.py",
        "return drafts[: self.matcher.validate_tokens(drafts)]",
        "return drafts",
        "Guesses that the grammar forbids are verified all the same.",
        (TEST_GRAMMARS,),
    ),
    Mutant(
        "schema-weakens-itself",
        GRAMMARS,
        "overrides: dict[str, Any] = dict(JSON_OPTIONS)",
        "overrides: dict[str, Any] = {}",
        "A schema can have its own keywords ignored.",
        (TEST_GRAMMARS,),
    ),
    Mutant(
        "one-grammar-for-all-white-space",
        "nanoengine/features/structured/params.py",
        "return self.kind, self.text, self.disable_any_whitespace, self.whitespace_pattern",
        "return self.kind, self.text",
        "Who asks for other white space gets the grammar of who asked before.",
        (TEST_GRAMMARS,),
    ),
    Mutant(
        "thoughts-are-constrained",
        "nanoengine/features/structured/constraint.py",
        "self.is_open = not behind",
        "self.is_open = True",
        "What a model thinks before it answers must match the grammar, too.",
        (TEST_GRAMMARS,),
    ),
    Mutant(
        "drafts-behind-a-thought",
        "nanoengine/features/structured/constraint.py",
        "                    return drafts[:place]\n",
        "                    return drafts\n",
        "Drafts behind the end of a thought are verified before any mask holds.",
        (TEST_GRAMMARS,),
    ),
    Mutant(
        "grammars-rest-while-they-are-used",
        STRUCTURED,
        "self.is_idle = not self.constraints and not self._in_flight",
        "self.is_idle = True",
        "Behind the first step of a constrained sequence, no masks are filled any more.",
        (TEST_ENDINGS,),
    ),
    Mutant(
        "masks-that-fail-end-the-engine",
        STRUCTURED,
        "        wait([self._bits])\n",
        "        self._bits.result()\n",
        "Where masks cannot be filled, the engine raises behind the step, and serves nobody any more.",
        (TEST_ENDINGS,),
    ),
    Mutant(
        "masks-of-the-model's-size",
        STRUCTURED,
        "words = -(-self.grammars.mask_size // 32)",
        "words = -(-self.grammars.vocab_size // 32)",
        "llguidance writes no mask where the tokenizer has more tokens than the model.",
        (TEST_GRAMMARS,),
    ),
    Mutant(
        "grammars-are-not-tried",
        GRAMMARS,
        "            verdict = self._trial.verdict(grammar, notation)\n",
        '            verdict = type(self._trial.verdict(""))("", 0)\n',
        "A grammar that is too deep ends the whole process.",
        (TEST_GRAMMARS,),
    ),
    Mutant(
        "nothing-is-forced",
        "nanoengine/features/structured/forced.py",
        "if drafts := until_the_end(forced, seq, self.vocab_size):",
        "if drafts := []:",
        "What a grammar forces is computed token by token.",
        (EVERY_WAY,),
    ),
    Mutant(
        "second-marks-escape",
        "nanoengine/models/tools/grammar.py",
        "rules.up_to('trigger', *format.begins)",
        "rules.up_to('trigger', *format.begins[:1])",
        "A model that begins a call with another mark of its format calls a strict tool as it likes.",
        (TEST_CALLS,),
    ),
    Mutant(
        "marks-written-out-escape",
        "nanoengine/models/tools/rules.py",
        "({' | '.join([name, *tokens])})",
        "({' | '.join(tokens or [name])})",
        "A model that writes the mark of a call out, and not as its token, calls a strict tool as it likes.",
        (TEST_CALLS,),
    ),
    Mutant(
        "messages-in-messages",
        "nanoengine/models/tools/grammar.py",
        'rules.without("TEXT", *HARMONY_MARKS)',
        '"TEXT"',
        "What gpt-oss tells the user may hold the head of a message that calls a strict tool.",
        (TEST_HARMONY,),
    ),
    Mutant(
        "strings-that-read-as-lists",
        "nanoengine/models/tools/xml_grammar.py",
        "        if tables:  # a string that begins as one of them would be read as one\n",
        "        if False:\n",
        "Where a string or a list of numbers may be, a list of strings is written as a string, and read as a list.",
        (TEST_XML,),
    ),
    Mutant(
        "long-values-are-read-again",
        "nanoengine/models/tools/xml_calls.py",
        "return Outcome.MORE, max(at, len(text) - len(END_OF_PARAMETER) + 1)",
        "return Outcome.MORE, at",
        "A long value is read again with each piece of it.",
        (TEST_PARSER,),
    ),
    Mutant(
        "marks-of-no-call-are-lost",
        "nanoengine/models/tools/marked.py",
        "self._say(self._mark + read)",
        "self._say(read)",
        "The user is not told the mark in front of what is no call.",
        (TEST_PARSER,),
    ),
)
