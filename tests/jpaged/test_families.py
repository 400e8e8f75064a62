"""Every family through the engine: the greedy tokens of transformers, chunked, preempted and behind its windows.

The golden files are those of tests/models/families/test_goldens.py, where logits are compared.
"""

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from jpaged import Engine, SamplingParams

FOLDERS = sorted(path for path in (Path(__file__).parents[1] / "golden" / "families").iterdir())
FAST = {
    "gemma2", "gemma3", "gpt2", "gpt_neox", "granite", "llama", "mistral_window", "olmo2", "olmo3", "phi3", "qwen2",
    "qwen3", "smollm3",
}  # fmt: skip
"""One folder of each architecture, for every run."""
PROMPT_LENS, NUM_TOKENS = (48, 51, 55), 64
SIZES: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": NUM_TOKENS, "block_size": 8, "warmup": "off",
    "skip_tokenizer_init": True, "enable_prefix_caching": False, "num_decode_steps": 4,
}  # fmt: skip
"""Prompts take three chunks and more."""
NUM_BLOCKS = {"recompute": 18, "swap": 18}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(
    "directory",
    [pytest.param(path, id=path.name, marks=[pytest.mark.slow] * (path.name not in FAST)) for path in FOLDERS],
)
def test_greedy_tokens_are_those_of_transformers(directory: Path, mode: str) -> None:
    """Three beginnings of one golden sequence run together, in a pool that has room for two of them."""
    tokens = load_file(directory / "golden.safetensors")["tokens"].tolist()
    options = {"num_blocks": NUM_BLOCKS[mode], "preemption_mode": mode, "num_host_blocks": 40 if mode == "swap" else 0}
    with Engine(str(directory), **SIZES, **options) as engine:
        prompts = [{"prompt_token_ids": tokens[:length]} for length in PROMPT_LENS]
        params = [
            SamplingParams(temperature=0, max_tokens=NUM_TOKENS - length, ignore_eos=True, detokenize=False)
            for length in PROMPT_LENS
        ]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        stats = engine.stats()
    for output, length in zip(outputs, PROMPT_LENS, strict=True):
        assert list(output.outputs[0].token_ids) == tokens[length:]
    assert stats["preemptions"] > 0
