"""OpenVINO GenAI on a CPU as a peer of `jpaged bench`: see jpaged/commands/bench/peer.py.

pip install openvino-genai optimum-intel
optimum-cli export openvino --model checkpoints/hf-f32 --weight-format fp32 checkpoints/openvino
jpaged bench throughput --peer "openvino=python scripts/peers/openvino.py --model checkpoints/openvino --dtype bfloat16"

Its pipeline of continuous batching computes as many rows as there are requests, whatever its option `max_num_seqs`
says: requests are given to it as rows become free. Each run has a pipeline of its own, whose prefix cache is empty.
"""

import argparse
import json
import os
import sys
import time
from collections import deque
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
parser.add_argument("--max-num-seqs", type=int, default=16)
parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
parser.add_argument("--threads", type=int, default=2)
args = parser.parse_args()

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path.pop(0)  # This folder, where this file would be `openvino`.

import numpy as np  # noqa: E402
import openvino as ov  # noqa: E402
import openvino_genai as genai  # noqa: E402

PRECISION = {"float32": "f32", "bfloat16": "bf16"}[args.dtype]
VOCAB_SIZE = 1000  # Of the tokens of the run before each measurement.


def new_pipeline() -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = args.max_num_seqs
    scheduler.max_num_batched_tokens = args.max_num_batched_tokens
    scheduler.cache_size = 2  # GB
    scheduler.enable_prefix_caching = True
    hints = {"INFERENCE_PRECISION_HINT": PRECISION, "KV_CACHE_PRECISION": PRECISION}
    threads = {"INFERENCE_NUM_THREADS": args.threads}
    return genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", {**hints, **threads})


def run(pipeline: Any, requests: list[dict[str, Any]]) -> int:
    """Run requests, at most `--max-num-seqs` at a time; return the number of tokens that were generated."""
    waiting, live, num_out = deque(enumerate(requests)), [], 0
    while waiting or live:
        while waiting and len(live) < args.max_num_seqs:
            number, request = waiting.popleft()
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = request["out"], True, False
            config.stop_token_ids, config.eos_token_id = set(), -1
            live.append(pipeline.add_request(number, ov.Tensor(np.array([request["prompt"]], np.int64)), config))
        pipeline.step()
        for handle in live:
            if handle.can_read():
                num_out += sum(len(output.generated_ids) for output in handle.read().values())
        live = [handle for handle in live if handle.get_status() == genai.GenerationStatus.RUNNING or handle.can_read()]
    return num_out


def answer(**what: object) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


new_pipeline()  # Compiles the model once, to fail before the first run.
answer(ready=f"openvino-genai {genai.__version__}, {args.dtype}", threads=args.threads, max_num_seqs=args.max_num_seqs)
for line in sys.stdin:
    work = json.loads(line)
    assert work["max_num_seqs"] == args.max_num_seqs, "start it with the bench's --max-num-seqs"
    pipeline = new_pipeline()
    generator = np.random.default_rng(0)
    run(pipeline, [{"prompt": generator.integers(VOCAB_SIZE, size=40).tolist(), "out": 4} for _ in range(4)])
    start = time.perf_counter()
    tokens = run(pipeline, work["requests"])
    answer(seconds=time.perf_counter() - start, tokens=tokens)
    del pipeline
