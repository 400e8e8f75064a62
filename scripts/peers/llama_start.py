"""llama.cpp as a command of `scripts/bench_start.py`: loads a file, answers one chat prompt, and ends.

    python scripts/bench_start.py "now=python -m jpaged.generate" \
        "llama.cpp=python scripts/peers/llama_start.py --model FILE.gguf"

Its context has 2,048 tokens. Weights are not repacked as they are loaded: llama-cpp-python 0.3.36 crashes for it with
Q4_1 on a processor with AMX, and it takes time.
"""

import argparse
import ctypes

import llama_cpp as lib

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--max-tokens", type=int, default=8)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("prompt")
args = parser.parse_args()

lib.llama_backend_init()
params = lib.llama_model_default_params()
params.use_extra_bufts = False
model = lib.llama_model_load_from_file(args.model.encode(), params)
assert model, f"{args.model} cannot be loaded"
vocab = lib.llama_model_get_vocab(model)
options = lib.llama_context_default_params()
options.n_ctx, options.n_threads, options.n_threads_batch = 2048, args.threads, args.threads
context = lib.llama_init_from_model(model, options)
assert context, "no context"

message = (lib.llama_chat_message * 1)(lib.llama_chat_message(b"user", args.prompt.encode()))
template, text = lib.llama_model_chat_template(model, None), ctypes.create_string_buffer(1 << 16)
length = lib.llama_chat_apply_template(template, message, 1, True, text, len(text))
assert 0 < length <= len(text), "the chat template cannot be applied"
tokens = (lib.llama_token * 2048)()
count = lib.llama_tokenize(vocab, text.raw[:length], length, tokens, len(tokens), True, True)
assert count > 0, "the prompt cannot be tokenized"
sampler = lib.llama_sampler_init_greedy()
piece = ctypes.create_string_buffer(256)
batch = lib.llama_batch_get_one(tokens, count)
for _ in range(args.max_tokens):
    assert lib.llama_decode(context, batch) == 0, "llama_decode failed"
    token = lib.llama_sampler_sample(sampler, context, -1)
    if lib.llama_vocab_is_eog(vocab, token):
        break
    size = lib.llama_token_to_piece(vocab, token, piece, len(piece), 0, False)
    print(piece.raw[:size].decode(errors="replace"), end="", flush=True)
    tokens[0] = token
    batch = lib.llama_batch_get_one(tokens, 1)
print()
