"""A model is told how many tokens of a step are no padding, in steps of every kind: padding goes to no expert."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import Engine, SamplingParams
from jpaged.models.decoder import Decoder

MODEL = Path(__file__).parents[1] / "golden" / "families" / "mixtral"
SIZES: dict[str, Any] = {
    "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 64, "block_size": 8, "num_blocks": 65,
    "long_prefill_token_threshold": 5, "enable_prefix_caching": False, "warmup": "off", "skip_tokenizer_init": True,
}  # fmt: skip
PROMPTS = [[1 + (3 * row + at) % 90 for at in range(length)] for row, length in enumerate((3, 11, 7))]
NUM_OUTPUTS = 9
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_OUTPUTS, ignore_eos=True, detokenize=False)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that gets (tokens, tokens with padding) of each step that a decoder computes."""
    found: list[tuple[int, int]] = []
    embedded = Decoder.embedded

    def counted(self: Decoder, inputs: Any) -> Any:
        padded = inputs.token_ids.shape[0]
        jax.debug.callback(lambda number: found.append((int(number), padded)), jnp.asarray(inputs.num_tokens))
        return embedded(self, inputs)

    monkeypatch.setattr(Decoder, "embedded", counted)
    return found


@pytest.mark.parametrize("num_decode_steps", [1, 4])
def test_every_step_counts_its_tokens_and_not_its_padding(counts: list[tuple[int, int]], num_decode_steps: int) -> None:
    """Prompts in chunks beside decodes, decodes alone, one or several a dispatch, and scores of given tokens."""
    with Engine(str(MODEL), **SIZES, num_decode_steps=num_decode_steps) as engine:
        jax.effects_barrier()
        counts.clear()
        engine.generate(PROMPTS, PARAMS, use_tqdm=False)
        jax.effects_barrier()
        numbers, padded = np.array(counts).T
        assert (numbers <= padded).all()
        assert (numbers < padded).any(), "no step has padding"
        wanted = sum(map(len, PROMPTS)) + len(PROMPTS) * (NUM_OUTPUTS - 1)
        if num_decode_steps == 1:
            assert numbers.sum() == wanted
        else:  # A row that has ended is computed again until the others end, too.
            assert wanted <= numbers.sum() < wanted + len(PROMPTS) * num_decode_steps
        counts.clear()
        engine.logprobs(PROMPTS[1])
        jax.effects_barrier()
        assert sum(number for number, _ in counts) in (len(PROMPTS[1]) - 1, len(PROMPTS[1]))
