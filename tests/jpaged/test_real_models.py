"""Real weights against transformers with torch in float32: greedy tokens and perplexity, from GGUF and safetensors.

scripts/make_model_goldens.py makes the golden files. Torch adds up in another order: where the two likeliest tokens are
nearer than MIN_MARGIN either may come, and the comparison of its item ends with another one.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jpaged import Engine, SamplingParams
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.weights.loading import abstract_weights, load_weights
from jpaged.models.weights.saving import save_checkpoint
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.sharding import device_mesh
from jpaged.startup.model_source import resolve_model

from ..real_models import QWEN_05B, QWEN_15B, real_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]
GOLDEN = Path(__file__).parents[1] / "golden"
MIN_MARGIN = 1e-3
MODELS: dict[str, Callable[[], Path]] = {
    "smollm2-perplexity": lambda: resolve_model("smollm2-135m").path,
    "qwen2.5-coder-0.5b": lambda: real_model(QWEN_05B),
    "qwen2.5-coder-1.5b": lambda: real_model(QWEN_15B),
}
SIZES: dict[str, Any] = {
    "max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512, "num_blocks": 257, "block_size": 32,
    "warmup": "off", "skip_tokenizer_init": True,
}  # fmt: skip


def check_model(path: Path, golden: dict[str, Any]) -> None:
    """Run the prompts together, and score the passage."""
    params = SamplingParams(temperature=0, max_tokens=64, detokenize=False)
    scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    with Engine(str(path), **SIZES) as engine:
        outputs = engine.generate([item["prompt_ids"] for item in golden["items"]], params, use_tqdm=False)
        scored = engine.generate([golden["passage_ids"]], scoring, use_tqdm=False)[0]
    num_compared = 0
    for output, item in zip(outputs, golden["items"], strict=True):
        ours, theirs = list(output.outputs[0].token_ids), item["output_ids"]
        num_same = 0
        while num_same < min(len(ours), len(theirs)) and ours[num_same] == theirs[num_same]:
            num_same += 1
        # Up to where torch itself was close to another token.
        assert ours == theirs or item["margins"][num_same] <= MIN_MARGIN
        num_compared += num_same
    assert num_compared > 0.9 * sum(len(item["output_ids"]) for item in golden["items"])
    pairs = zip(scored.prompt_logprobs[1:], golden["passage_ids"][1:], strict=True)
    mean = sum(logprobs[token_id].logprob for logprobs, token_id in pairs) / (len(golden["passage_ids"]) - 1)
    assert math.exp(-mean) == pytest.approx(golden["perplexity"], rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_perplexity_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """First from the GGUF file, then from safetensors that are saved of its weights."""
    path, golden = MODELS[name](), json.loads((GOLDEN / f"{name}.json").read_text())
    check_model(path, golden)
    config, checkpoint = open_checkpoint(path)
    abstract = abstract_weights(config, "float32", device_mesh(jax.devices()[:1]), NATIVE_OPS)
    save_checkpoint(load_weights(abstract, config, checkpoint), tmp_path / "saved", format="safetensors")
    check_model(tmp_path / "saved", golden)
