"""llama.cpp as a peer of `jpaged bench`: its batches, several sequences at once. See jpaged/commands/bench/peer.py.

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python
    jpaged bench throughput --model FILE.gguf --dtype bfloat16 --max-num-seqs 16 --workload A decode B prompt-512 \
        --peer "llama.cpp=python scripts/peers/llama.py --model FILE.gguf --max-num-seqs 16"

Give it the same file, sequences and threads as the bench; the threads' default is that of two cores. Its key and value
pages are float16, and it rounds activations to 8 bits where weights are quantized: both are its defaults.

A request is taken in as soon as a sequence is free, into the one whose last prompt begins as its own for longest: what
they have in common is not computed anew. Prompts go in batches of 512 beside those that decode. So its server works.
"""

import argparse
import ctypes
import json
import sys
import time
from collections import deque
from pathlib import Path

import llama_cpp as lib
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--max-num-seqs", type=int, default=16)
parser.add_argument("--batch", type=int, default=512)
parser.add_argument("--threads", type=int, default=2)
help = "repack weights as it loads, `use_extra_bufts`; auto: not where that crashes"
parser.add_argument("--extra-buffers", choices=["auto", "on", "off"], default="auto", help=help)
args = parser.parse_args()

SEQUENCE_LEN = 2048
CRASHING_TYPES = {"2": "Q4_0", "3": "Q4_1", "7": "Q8_0"}
"""`general.file_type` of files that llama-cpp-python 0.3.36 repacks for AMX and then crashes on."""


def file_type() -> str:
    """Return the file's `general.file_type`, read without its weights; empty if it has none."""
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(args.model.encode(), params)
    assert model, f"{args.model} cannot be loaded"
    text = ctypes.create_string_buffer(64)
    length = lib.llama_model_meta_val_str(model, b"general.file_type", text, len(text))
    lib.llama_model_free(model)
    return text.value.decode() if length > 0 else ""


def may_repack() -> bool:
    """Return whether weights are repacked.

    Without AMX nothing crashes, and repacked weights are multiplied faster: there they are repacked whatever their
    type, so that llama.cpp runs as fast as it can.
    """
    if args.extra_buffers != "auto":
        return args.extra_buffers == "on"
    has_amx = "amx_tile" in Path("/proc/cpuinfo").read_text()
    return not (has_amx and file_type() in CRASHING_TYPES)


lib.llama_backend_init()
params = lib.llama_model_default_params()
params.use_extra_bufts = may_repack()
model = lib.llama_model_load_from_file(args.model.encode(), params)
assert model, f"{args.model} cannot be loaded"
options = lib.llama_context_default_params()
options.n_ctx = args.max_num_seqs * SEQUENCE_LEN
options.n_batch = options.n_ubatch = args.batch
options.n_seq_max = args.max_num_seqs
options.n_threads = options.n_threads_batch = args.threads
options.kv_unified = False
context = lib.llama_init_from_model(model, options)
assert context, "no context"
vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
batch = lib.llama_batch_init(args.batch, 0, 1)


def decode(rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
    """Decode a batch of (token, position, sequence, is wanted); return the likeliest next token of wanted sequences."""
    batch.n_tokens = len(rows)
    for index, (token, position, sequence, is_wanted) in enumerate(rows):
        batch.token[index], batch.pos[index], batch.logits[index] = token, position, is_wanted
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
    assert lib.llama_decode(context, batch) == 0, "llama_decode failed"
    drawn = {}
    for index, (_, _, sequence, is_wanted) in enumerate(rows):
        if is_wanted:
            logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, index), (vocab_size,))
            drawn[sequence] = int(logits.argmax())
    return drawn


def num_common(tokens: list[int], others: list[int]) -> int:
    """Return the number of tokens with which both begin."""
    pairs = zip(tokens, others, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(tokens), len(others)))


def run(requests: list[dict], max_num_seqs: int) -> int:
    """Run all requests and return the number of generated tokens."""
    memory = lib.llama_get_memory(context)
    lib.llama_memory_clear(memory, True)
    waiting, free = deque(requests), list(range(max_num_seqs))
    kept: dict[int, list[int]] = {sequence: [] for sequence in free}
    live: dict[int, dict] = {}
    num_out = 0
    while waiting or live:
        while waiting and free:
            request = waiting.popleft()
            prompt = request["prompt"]
            sequence = max(free, key=lambda one: num_common(kept[one], prompt))
            free.remove(sequence)
            at = min(num_common(kept[sequence], prompt), len(prompt) - 1)
            lib.llama_memory_seq_rm(memory, sequence, at, -1)
            live[sequence] = {"prompt": prompt, "at": at, "left": request["out"], "next": None}
        rows = []
        for sequence, one in live.items():
            if one["next"] is not None:
                rows.append((one["next"], one["at"], sequence, True))
                one["at"] += 1
        for sequence, one in live.items():
            if one["next"] is None:
                part = one["prompt"][one["at"] : one["at"] + args.batch - len(rows)]
                for token in part:
                    one["at"] += 1
                    rows.append((token, one["at"] - 1, sequence, one["at"] == len(one["prompt"])))
        for sequence, token in decode(rows).items():
            one = live[sequence]
            one["next"], one["left"] = token, one["left"] - 1
            num_out += 1
            if not one["left"]:
                del live[sequence]
                kept[sequence] = one["prompt"]
                free.append(sequence)
    return num_out


version = f"llama.cpp by llama-cpp-python {lib.__version__}, {args.model.rsplit('/', 1)[-1]}"
sizes = {"threads": args.threads, "max_num_seqs": args.max_num_seqs}
print(json.dumps({"ready": version, **sizes, "use_extra_bufts": params.use_extra_bufts}), flush=True)
for line in sys.stdin:
    work = json.loads(line)
    assert work["max_num_seqs"] == args.max_num_seqs, "start it with the bench's --max-num-seqs"
    start = time.perf_counter()
    tokens = run(work["requests"], work["max_num_seqs"])
    print(json.dumps({"seconds": time.perf_counter() - start, "tokens": tokens}), flush=True)
