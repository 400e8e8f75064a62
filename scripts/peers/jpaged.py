"""Another checkout of jpaged as a peer of `jpaged bench`, such as the parent commit. See jpaged/commands/bench/peer.py.

    git worktree add ../parent HEAD~1
    jpaged bench throughput --workload A B C --peer "parent=python scripts/peers/jpaged.py --checkout ../parent"

Both run the default model with the bench's default sizes. Anything else is given to both: to the bench as its own
flags, to the peer as --options, a JSON object of `EngineConfig` fields. To compare with an environment of its own, name
that environment's interpreter in the command.
"""

import argparse
import json
import os
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--checkout", required=True)
parser.add_argument("--max-num-seqs", type=int, default=16)
parser.add_argument("--max-model-len", type=int, default=2048)
parser.add_argument("--options", type=json.loads, default={})
args = parser.parse_args()

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # Nothing but answers may go to stdout.
sys.path[0] = os.path.abspath(args.checkout)  # In place of this folder, where this file would be `jpaged`.

import jpaged  # noqa: E402

assert os.path.dirname(jpaged.__file__) == os.path.join(sys.path[0], "jpaged"), f"imported {jpaged.__file__}"
sizes = {"max_num_seqs": args.max_num_seqs, "max_model_len": args.max_model_len}
engine = jpaged.Engine(**sizes, **args.options)
commit = subprocess.run(["git", "-C", args.checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)


def answer(**what: object) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


answer(ready=f"jpaged at {commit.stdout.strip() or args.checkout}", **sizes, options=args.options)
for line in sys.stdin:
    work = json.loads(line)
    assert work["max_num_seqs"] == args.max_num_seqs, "start it with the bench's --max-num-seqs"
    engine.reset_prefix_cache()
    prompts = [request["prompt"] for request in work["requests"]]
    params = [
        jpaged.SamplingParams(temperature=0.0, max_tokens=request["out"], ignore_eos=True, detokenize=False, seed=index)
        for index, request in enumerate(work["requests"])
    ]
    start = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    answer(seconds=seconds, tokens=sum(len(output.outputs[0].token_ids) for output in outputs))
