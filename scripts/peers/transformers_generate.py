"""transformers' `generate` as a peer of `jpaged bench`: static batches in order of arrival.

See jpaged/commands/bench/peer.py.

    pip install transformers torch
    jpaged bench throughput \
        --peer "transformers=python scripts/peers/transformers_generate.py --model checkpoints/hf-f32 --dtype float32"
"""

import argparse
import json
import sys
import time

import torch
import transformers

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
parser.add_argument("--threads", type=int, default=2)
args = parser.parse_args()
torch.set_num_threads(args.threads)
model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)


def run(batch: list[dict]) -> int:
    """Generate from a batch, left-padded to the longest prompt, until the last request has its tokens."""
    longest = max(len(request["prompt"]) for request in batch)
    padded = [[0] * (longest - len(request["prompt"])) + request["prompt"] for request in batch]
    mask = [[0] * (longest - len(request["prompt"])) + [1] * len(request["prompt"]) for request in batch]
    num_out = max(request["out"] for request in batch)
    with torch.inference_mode():
        ids, attention_mask = torch.tensor(padded), torch.tensor(mask)
        out = model.generate(ids, attention_mask=attention_mask, max_new_tokens=num_out, min_new_tokens=num_out)
    assert out.shape[1] == longest + num_out
    return sum(request["out"] for request in batch)


version = f"transformers {transformers.__version__}, torch {torch.__version__}, {args.dtype}"
print(json.dumps({"ready": version, "threads": args.threads}), flush=True)
for line in sys.stdin:
    work = json.loads(line)
    requests, size = work["requests"], work["max_num_seqs"]
    start = time.perf_counter()
    tokens = sum(run(requests[first : first + size]) for first in range(0, len(requests), size))
    print(json.dumps({"seconds": time.perf_counter() - start, "tokens": tokens}), flush=True)
