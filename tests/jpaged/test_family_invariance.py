"""On one CPU a request has the same bits in any company, whatever the family: norms, activations and soft caps too."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from jpaged import Engine, RequestOutput, SamplingParams

pytestmark = pytest.mark.usefixtures("optimized")
FOLDERS = Path(__file__).parents[1] / "golden" / "families"
FAMILIES = (
    "gemma3", "granite", "gemma2", "gpt2", "gpt_neox", "gpt_oss", "mixtral", "olmo2", "olmoe", "phi3_partial",
    "qwen2_moe", "qwen3", "qwen3_moe", "smollm3",
)  # fmt: skip
SIZES: dict[str, Any] = {
    "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 8, "num_blocks": 513,
    "num_decode_steps": 1, "enable_prefix_caching": False, "warmup": "off", "skip_tokenizer_init": True,
    "attention_backend": "native",
}  # fmt: skip
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=5, ignore_eos=True, detokenize=False)


def bits(output: RequestOutput) -> list[Any]:
    """Return the tokens drawn, and the logprobs as they are: equal floats have equal bits."""
    completion = output.outputs[0]
    return [list(completion.token_ids), [{i: entry.logprob for i, entry in at.items()} for at in completion.logprobs]]


BY_XLA = {"attention_backend": "xla", "deterministic": True}
"""Products of XLA round by the size of the step, which `deterministic` keeps the same."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in FAMILIES),
        *(("gemma2", {"kv_cache_dtype": dtype}) for dtype in ("int8", "fp8")),
        *((name, BY_XLA) for name in ("mixtral", "qwen2_moe")),
        ("gpt_oss", BY_XLA | {"dtype": "bfloat16"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())) or "native",
)
def test_a_request_has_the_same_bits_alone_and_beside_others(name: str, options: dict[str, Any]) -> None:
    tokens = load_file(FOLDERS / name / "golden.safetensors")["tokens"].tolist()
    prompts = [tokens[:length] for length in (37, 5, 48, 1, 22, 30, 11)]
    with Engine(str(FOLDERS / name), **(SIZES | options)) as engine:
        alone = [bits(engine.generate([prompt], PARAMS, use_tqdm=False)[0]) for prompt in prompts[:3]]
        together = [bits(output) for output in engine.generate(prompts, PARAMS, use_tqdm=False)]
    assert together[:3] == alone
