"""Steps of an engine on a CPU beside what its processor gives in the same minute.

    gcc -O2 -march=native -o peaks scripts/bench/peaks.c -lpthread
    python scripts/bench/steps.py --dtype bfloat16 --peaks ./peaks --output docs/measurements/steps_bfloat16.json
    python scripts/bench/steps.py --dtype bfloat16 --peaks ./peaks --shape 1.1B
    python scripts/bench/steps.py --dtype bfloat16 --peaks ./peaks --model FILE.gguf --quantization auto

`peaks` prints what two threads reach in products of the matrix unit and of vectors, and in reads of memory. It runs
before each cell of each round. A cell is a prompt of 512 tokens, a step of 16
rows at a context of about 130, or one of a single row. Shares are those of the products of a prompt's layers, and of
the bytes of weights and pages that a decode step reads, as the engine holds them: codes where it keeps codes, and no
embedding table where the head has a matrix of its own. Medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

import jpaged
from jpaged import Engine, SamplingParams
from jpaged.models.weights.weights import Weights

PROMPT_LEN, CONTEXT_LEN, NUM_DECODED = 512, 114, 33
TINYLLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""The shape of TinyLlama, 1.1B."""


def measured_peaks(command: str) -> dict[str, float]:
    """Return TFLOP/s of each unit, and GB/s of reads that no cache holds."""
    text = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True).stdout
    peaks = {name: float(value) for name, value in re.findall(r"^(\w+_\w+) ([\d.]+) TFLOP/s", text, re.MULTILINE)}
    reads = re.findall(r"^read of (\d+) MiB ([\d.]+) GB/s", text, re.MULTILINE)
    return peaks | {"read": float(next(speed for size, speed in reads if int(size) >= 256))}


def step_bytes(weights: Weights) -> int:
    """Return the bytes of weights that a step of a few rows reads: an embedding beside a head gives it a few rows."""
    flat = [(path[0], leaf.size * leaf.dtype.itemsize) for path, leaf in nnx.to_flat_state(weights.state)]
    has_head = any(module == "head" for module, _ in flat)
    return sum(num_bytes for module, num_bytes in flat if module != "embed" or not has_head)


class Cells:
    """The cells of one engine, and what each has to compute or to read."""

    def __init__(self, engine: Engine) -> None:
        self.engine, config = engine, engine.handle.decoder
        self.rng, self.vocab_size = np.random.default_rng(0), config.vocab_size
        kv_width, width = config.num_kv_heads * config.head_size, config.num_heads * config.head_size
        per_layer = config.hidden_size * (2 * width + 2 * kv_width + 3 * config.intermediate_size)
        self.layer_weights = config.num_layers * per_layer
        self.weight_bytes = step_bytes(engine.runner.weights)
        item_bytes = np.dtype("uint16" if engine.step_sizes.dtype == "bfloat16" else "float32").itemsize
        self.token_bytes = 2 * config.num_layers * kv_width * item_bytes

    def seconds(self, num_rows: int, num_tokens: int, num_out: int) -> float:
        prompts = [self.rng.integers(100, self.vocab_size, num_tokens).tolist() for _ in range(num_rows)]
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        self.engine.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    def prompt(self, peaks: dict[str, float], unit: str) -> dict[str, float]:
        """Return the milliseconds of a prompt and the share of the peak of `unit`."""
        seconds = self.seconds(1, PROMPT_LEN, 1)
        tflops = 2 * self.layer_weights * PROMPT_LEN / seconds / 1e12
        return {"ms": 1e3 * seconds, "TFLOP/s": tflops, "share": tflops / peaks[unit]}

    def decode(self, peaks: dict[str, float], num_rows: int) -> dict[str, float]:
        """Return the milliseconds of a step that decodes `num_rows`, and the share of reading its bytes."""
        first, all_tokens = (self.seconds(num_rows, CONTEXT_LEN, num_out) for num_out in (1, NUM_DECODED))
        seconds = (all_tokens - first) / (NUM_DECODED - 1)
        mean_context = CONTEXT_LEN + NUM_DECODED / 2
        num_bytes = self.weight_bytes + num_rows * mean_context * self.token_bytes
        speed = num_bytes / seconds / 1e9
        return {"ms": 1e3 * seconds, "GB/s": speed, "share": speed / peaks["read"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--peaks", required=True, help="command that prints the processor's peaks")
    parser.add_argument("--shape", choices=["135M", "1.1B"], default="135M", help="the default model, or dummy weights")
    parser.add_argument("--model", help="in place of --shape")
    parser.add_argument("--quantization", default="none", help="as that of the engine")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    options: dict[str, Any] = {"dtype": args.dtype, "max_num_seqs": 16, "max_model_len": 2048}
    options["quantization"] = args.quantization
    with tempfile.TemporaryDirectory() as directory:
        if args.model:
            options["model"] = args.model
        elif args.shape == "1.1B":
            Path(directory, "config.json").write_text(json.dumps(TINYLLAMA))
            options |= {"model": directory, "load_format": "dummy", "skip_tokenizer_init": True}
        with Engine(**options, enable_prefix_caching=False) as engine:
            cells, peaks, found = Cells(engine), list[dict[str, float]](), dict[str, list[dict[str, float]]]()
            weight_bytes = cells.weight_bytes
            for round_number in range(-1, args.rounds):  # The first round, which compiles, is not counted.
                for name in ("prompt", "16 rows", "1 row"):
                    now = measured_peaks(args.peaks)
                    unit = "amx_bf16" if args.dtype == "bfloat16" and "amx_bf16" in now else "fma_f32"
                    cell = cells.prompt(now, unit) if name == "prompt" else cells.decode(now, int(name.split()[0]))
                    if round_number >= 0:
                        peaks.append(now)
                        found.setdefault(name, []).append(cell)
    report = {
        "jpaged": jpaged.__version__,
        "shape": args.shape if args.model is None else Path(args.model).name,
        "quantization": args.quantization,
        "dtype": args.dtype,
        "weight_bytes": weight_bytes,
        "rounds": args.rounds,
        "peaks": {name: statistics.median(each[name] for each in peaks) for name in peaks[0]},
        "medians": {
            name: {key: round(statistics.median(cell[key] for cell in rounds), 3) for key in rounds[0]}
            for name, rounds in found.items()
        },
        "rounds of each": found,
    }
    print(json.dumps({key: value for key, value in report.items() if key != "rounds of each"}, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
