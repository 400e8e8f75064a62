"""The sizes of an engine over several chips are those of one chip's share."""

from pathlib import Path

from jax.sharding import AbstractMesh

from jpaged.models.opening.reading import config_from_hf
from jpaged.pallas_kernels.ragged_paged_attention.tpu.backend import TpuBackend
from jpaged.sampling.logit_rules_spec import LogitRulesSpec
from jpaged.startup.abstract_engine import AbstractEngine

LLAMA2_7B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def test_pages_are_as_large_as_a_chips_own_heads_and_must_fit_into_its_vmem():
    """A v4 would have no room for tiles of all 32 KV heads."""
    config = config_from_hf(LLAMA2_7B, Path("config.json"))
    mesh = AbstractMesh((1, 4), ("data", "tensor"))
    engine = AbstractEngine(config, mesh, TpuBackend.for_heads("v4", 8, 128), LogitRulesSpec(config.vocab_size))
    assert engine.page_bytes(128, "bfloat16") == 32 * 2 * 128 * 8 * 128 * 2
