"""A conversation of two turns, each answer streamed: python examples/chat.py [MODEL]

The bundled model has learned code and no conversation. `nanoengine fetch smollm2` gets a small one that has: then give smollm2,
or any folder, .gguf file or hub name of a chat model.
"""

import sys

from nanoengine import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
sampling_params = SamplingParams(temperature=0, max_tokens=60)

with LLM(model, max_model_len=2048) as llm:
    messages = []
    for question in ("What is the capital of France?", "And of Italy?"):
        messages.append({"role": "user", "content": question})
        print(f"\n> {question}")
        answer = ""
        for piece in llm.stream(llm.tokenizer.encode_chat(messages), sampling_params):
            print(piece, end="", flush=True)
            answer += piece
        messages.append({"role": "assistant", "content": answer})
    print()
