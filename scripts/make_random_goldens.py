"""Make tests/golden/random_weights.json: greedy tokens of a small random model, for the check scripts.

    JAX_PLATFORMS=cpu python scripts/make_random_goldens.py

Random prompts are continued in float32 by plain XLA on a CPU. Those are kept in which every token was likelier than the
next one by more than `MIN_MARGIN`, so that bfloat16 on any device has to find the same tokens.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from device_checks.engine_check import GOLDEN, LLAMA_8B, SMALL_SIZES, model_folder

from jpaged import Engine, SamplingParams

CONFIG: dict[str, Any] = {
    **LLAMA_8B, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 10000.0, "max_position_embeddings": 1024,
}  # fmt: skip
MIN_MARGIN = 0.15
NUM_TRIED, NUM_KEPT = 900, 24
MAX_PROMPT, NUM_TOKENS = 300, 10


def main() -> None:
    rng = np.random.default_rng(0)
    lens = rng.integers(1, MAX_PROMPT + 1, NUM_TRIED)
    prompts = [rng.integers(0, CONFIG["vocab_size"], length).tolist() for length in lens]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, logprobs=2)
    options: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "attention_backend": "xla", **SMALL_SIZES}
    with model_folder(CONFIG) as folder, Engine(folder, **options) as engine:
        outputs = engine.generate(prompts, params)
    items = []
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        best = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in completion.logprobs]
        margins = [round(first - second, 4) for first, second, *_ in best]
        if min(margins) > MIN_MARGIN:
            item = {"prompt_ids": prompt, "output_ids": list(completion.token_ids), "top1_margin": margins}
            items.append(item)
    print(f"{len(items)} of {len(prompts)} prompts have no margin below {MIN_MARGIN}")
    about = f"load_format=dummy, float32, xla on a CPU, jax {jax.__version__}; scripts/make_random_goldens.py"
    lines = ",\n".join(f"  {json.dumps(item)}" for item in items[:NUM_KEPT])
    GOLDEN.write_text(
        f'{{\n "made": {json.dumps(about)},\n "config": {json.dumps(CONFIG)},\n "items": [\n{lines}\n ]\n}}\n'
    )


if __name__ == "__main__":
    main()
