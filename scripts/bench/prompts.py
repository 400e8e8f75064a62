"""Times prompts of one request in several checkouts of jpaged, in turns.

    git worktree add ../parent HEAD~1
    python scripts/bench/prompts.py --dtype bfloat16 --checkout parent=../parent --checkout new=. -o prompts.json
    python scripts/bench/prompts.py --dtype bfloat16 --without-amx …     # as processors without a matrix unit compute

Each checkout has a process of its own, with the default model's weights as floats and no prefix cache; they answer one
after another. A ratio is the median of those of neighbouring runs to the first checkout's. `cpu_s` is the processor
time of a prompt in all threads, which other processes change less than `wall_s`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LENGTHS = 64, 128, 512, 1500, 8000
MAX_MODEL_LEN = 8192


class Checkout:
    """A process that computes prompts by the jpaged of one checkout."""

    def __init__(self, path: str, args: argparse.Namespace) -> None:
        flags = ["--serve", "--dtype", args.dtype, *(["--without-amx"] if args.without_amx else [])]
        environment = {**os.environ, "PYTHONPATH": os.path.abspath(path)}
        command = [sys.executable, os.path.abspath(__file__), *flags]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def answer(self) -> dict[str, Any]:
        """Return what the process says next."""
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def time(self, length: int) -> dict[str, float]:
        """Return the seconds of one prompt of `length` tokens."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{length}\n")
        self.process.stdin.flush()
        return self.answer()


def serve(dtype: str, *, without_amx: bool) -> None:
    """Compute a prompt for each length that stdin names; print its seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Nothing but answers may go to stdout.
    import numpy as np

    import jpaged
    import jpaged.pallas_kernels.native.products.chain
    import jpaged.pallas_kernels.ragged_paged_attention.native.attention
    from jpaged.commands.bench.report import host_machine

    if without_amx:
        # In the module that names the processor's features too: results of the checks at start are kept by these.
        for name, module in list(sys.modules.items()):
            if name.startswith("jpaged.") and "has_amx_unit" in vars(module):
                vars(module)["has_amx_unit"] = lambda: False
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": MAX_MODEL_LEN}
    engine = jpaged.Engine(dtype=dtype, quantization="none", enable_prefix_caching=False, **sizes)
    rng, params = np.random.default_rng(0), jpaged.SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)

    def cpu_s() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    def answer(**what: Any) -> None:
        print(json.dumps(what), file=answers, flush=True)

    answer(jpaged=jpaged.__version__, **host_machine())
    for line in sys.stdin:
        prompt = rng.integers(100, engine.handle.decoder.vocab_size, int(line)).tolist()
        start, start_cpu = time.perf_counter(), cpu_s()
        engine.generate([prompt], params, use_tqdm=False)
        answer(wall_s=time.perf_counter() - start, cpu_s=cpu_s() - start_cpu)


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the medians of each checkout's runs, and of the ratios of neighbouring ones to the first checkout's."""
    first = next(iter(runs.values()))

    def medians(own: list[dict[str, float]]) -> dict[str, float]:
        values = {key: statistics.median(run[key] for run in own) for key in first[0]}
        pairs = list(zip(own, first, strict=True))
        ratios = {f"{key} ratio": statistics.median(run[key] / other[key] for run, other in pairs) for key in first[0]}
        return {key: round(value, 4) for key, value in (values | ratios).items()}

    return {name: medians(own) for name, own in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--checkout", metavar="NAME=PATH", action="append", default=[], help="the first is compared to")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help=f"tokens, at most {MAX_MODEL_LEN - 1}")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--without-amx", action="store_true", help="multiply by vectors")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.serve:
        serve(args.dtype, without_amx=args.without_amx)
        return
    checkouts = {name: Checkout(path, args) for name, path in (pair.split("=", 1) for pair in args.checkout)}
    machines = [checkout.answer() for checkout in checkouts.values()]
    found: dict[int, dict[str, dict[str, float]]] = {}
    for length in args.lengths:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
        for number in range(-1, args.runs):  # The first run of each compiles and is not counted.
            for name, checkout in checkouts.items():
                seconds = checkout.time(length)
                if number >= 0:
                    runs[name].append(seconds)
        found[length] = summary(runs)
        print(length, json.dumps(found[length]), file=sys.stderr, flush=True)
    for checkout in checkouts.values():
        checkout.process.communicate("")
    options = {"dtype": args.dtype, "without_amx": args.without_amx, "runs": args.runs, "load": os.getloadavg()}
    report = json.dumps({**machines[0], **options, "prompts": found}, indent=1)
    if args.output is None:
        print(report)
    else:
        args.output.write_text(report + "\n")


if __name__ == "__main__":
    main()
