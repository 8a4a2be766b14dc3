"""Mutants of reading GGUF files: header, blocks, names, config and tokenizer."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

HEADER = "nanoengine/models/gguf/header.py"
QUANTS = "nanoengine/kernels/quantized/ggml_numbers.py"
FILE = "nanoengine/models/gguf/file.py"
NAMES = "nanoengine/models/gguf/tensor_names.py"
TOKENIZER = "nanoengine/models/gguf/tokenizer.py"
TRANSLATE = "nanoengine/models/gguf/translate.py"
HYBRIDS = "nanoengine/models/gguf/hybrids.py"
TEST_HYBRIDS = "tests/models/gguf/test_hybrids.py"
TEST_HEADER = "tests/models/gguf/test_header.py"
TEST_TOKENIZER = "tests/models/gguf/test_tokenizer.py"

MUTANTS = (
    Mutant(
        "tensor-beyond-the-end-passes",
        HEADER,
        "if end > cursor.size:",
        "if False:",
        "A tensor whose bytes go beyond the end of the file is not refused.",
        (TEST_HEADER,),
    ),
    Mutant(
        "overlapping-tensors-pass",
        HEADER,
        "if record.offset < end:",
        "if False:",
        "Two tensors that share bytes are not refused.",
        (TEST_HEADER,),
    ),
    Mutant(
        "offsets-are-not-aligned",
        HEADER,
        "start = -(-cursor.at // alignment) * alignment",
        "start = cursor.at",
        "Tensors are read from where the header ends, and not from the next aligned byte.",
        (TEST_HEADER,),
    ),
    Mutant(
        "count-is-believed",
        HEADER,
        'if count > (self._end - self.at) // smallest or (count > MAX_ENTRIES and what in ("keys", "tensors")):',
        "if False:",
        "A number of entries that the file cannot hold is believed.",
        (TEST_HEADER,),
    ),
    Mutant(
        "shape-is-not-turned-round",
        HEADER,
        'shape = tuple(cursor.number("u8") for _ in range(dimensions))[::-1]',
        'shape = tuple(cursor.number("u8") for _ in range(dimensions))',
        "Rows and columns of tensors are swapped.",
        (TEST_HEADER,),
    ),
    Mutant(
        "q6-k-is-not-centered",
        QUANTS,
        "numbers = (_nibbles(blocks[:, :128], 64) | upper).float() - 32",
        "numbers = (_nibbles(blocks[:, :128], 64) | upper).float() - 31",
        "Numbers of Q6_K are off by one step.",
        ("tests/kernels/quantized/test_ggml_numbers.py",),
    ),
    Mutant(
        "native-codebook-has-a-wrong-byte",
        "nanoengine/kernels/native/cpp/quantized_format.h",
        "BYTE(38),",
        "BYTE(37),",
        "One number of the IQ4 formats is wrong in the native kernels.",
        ("tests/kernels/quantized/test_ggml_numbers.py",),
    ),
    Mutant(
        "q4-k-upper-scale-bits-are-lost",
        QUANTS,
        "scales = torch.cat([scales & 63, rest & 15 | scales >> 2 & 48], 1)",
        "scales = torch.cat([scales & 63, rest & 15], 1)",
        "The last four scales of a block of Q4_K lack their upper bits.",
        ("tests/kernels/quantized/test_ggml_numbers.py",),
    ),
    Mutant(
        "parts-of-other-models-pass",
        FILE,
        "if not np.array_equal(part.metadata[key], first.metadata[key]):",
        "if False:",
        "Parts of two models are read as one.",
        ("tests/models/gguf/test_file.py",),
    ),
    Mutant(
        "missing-tensors-pass",
        FILE,
        "if total != len(tensors):",
        "if False:",
        "Parts that lack tensors which the first one counts are not refused.",
        ("tests/models/gguf/test_file.py",),
    ),
    Mutant(
        "llama-rows-stay-paired",
        NAMES,
        'PAIRED = {"LlamaForCausalLM", "MixtralForCausalLM", ',
        'PAIRED = {"MixtralForCausalLM", ',
        "Rows of q and k of a Llama stay in the order in which llama.cpp rotates them.",
        ("tests/models/gguf/test_checkpoint.py",),
    ),
    Mutant(
        "gemma-norm-gets-one-twice",
        NAMES,
        'change = _one_less if architecture in SHIFTED and found.endswith("norm.weight") else None',
        "change = None",
        "Norms of Gemma, which these files store with the one, get it once more.",
        ("tests/models/gguf/test_checkpoint.py",),
    ),
    Mutant(
        "merges-go-by-lowest-score",
        TOKENIZER,
        'by_score = np.argsort(-scores, kind="stable").tolist()',
        'by_score = np.argsort(scores, kind="stable").tolist()',
        "SentencePiece tokens of the lowest score are merged first.",
        (TEST_TOKENIZER,),
    ),
    Mutant(
        "llama-prompt-begins-without-bos",
        TOKENIZER,
        'tokenizer, add_bos = _sentencepiece(metadata, vocab, ids["unk"]), True',
        'tokenizer, add_bos = _sentencepiece(metadata, vocab, ids["unk"]), False',
        "A prompt of a SentencePiece model does not begin with its first-of-text token where the file says nothing.",
        (TEST_TOKENIZER,),
    ),
    Mutant(
        "only-the-named-end-ends",
        TOKENIZER,
        "    ends = _ends_of_turn(vocab, types)\n",
        "    ends: list[int] = []\n",
        "Ends of a turn that a file does not name do not end the answer.",
        (TEST_TOKENIZER,),
    ),
    Mutant(
        "harmony-message-end-ends-the-turn",
        TOKENIZER,
        '        found.remove("<|end|>")  # there it ends a message, and the turn goes on\n',
        "        pass\n",
        "A model that thinks before it answers stops behind its thoughts.",
        (TEST_TOKENIZER,),
    ),
    Mutant(
        "gemma-27b-is-scaled-by-its-heads",
        TRANSLATE,
        'config["query_pre_attn_scalar"] = shared if is_27b else config["head_dim"]',
        'config["query_pre_attn_scalar"] = config["head_dim"]',
        "Scores of Gemma's 27B models are scaled by the size of a head.",
        ("tests/models/gguf/test_translate.py",),
    ),
    Mutant(
        "linear-scaling-is-ignored",
        TRANSLATE,
        'return rope | {"rope_type": "linear", "factor": factor}',
        'return rope | {"rope_type": "default"}',
        "A file's linear scaling of positions is dropped.",
        ("tests/models/gguf/test_translate.py",),
    ),
    Mutant(
        "heads-of-values-stand-as-at-hugging-face",
        HYBRIDS,
        'config["value_heads_are_tiled"] = name != "Qwen3NextForCausalLM"',
        'config["value_heads_are_tiled"] = False',
        "Heads of Qwen3.5 meet the keys of other heads.",
        (TEST_HYBRIDS,),
    ),
    Mutant(
        "rates-are-taken-for-their-logarithms",
        NAMES,
        "return (-rate.float()).log().flatten()",
        "return rate.float().flatten()",
        "States fade at other rates than those of the file.",
        (TEST_HYBRIDS,),
    ),
    Mutant(
        "norms-behind-recurrences-are-shifted",
        NAMES,
        'HFTensor("linear_attn.norm.weight")',
        'HFTensor("linear_attn.norm.weight", change=_one_less)',
        "The one norm of Qwen3.5 whose weights are the same in both kinds of files gets one taken away.",
        (TEST_HYBRIDS,),
    ),
    Mutant(
        "layers-that-guess-ahead-are-layers",
        HYBRIDS,
        'layers - keys.number("nextn_predict_layers", default=0)',
        "layers",
        "A file with multi-token prediction is refused for what its last layer lacks.",
        (TEST_HYBRIDS,),
    ),
)
