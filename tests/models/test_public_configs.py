"""The config.json of public models, from public sources that each file names, is read, and means the published size."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jpaged.models.families.table import BY_ARCHITECTURE
from jpaged.models.opening.reading import config_from_hf
from jpaged.models.weights.loading import abstract_weights
from jpaged.sharding import device_mesh

PUBLISHED = {
    "allenai/OLMo-2-1124-7B": 7.30e9,
    "allenai/OLMoE-1B-7B-0125-Instruct": 6.92e9,
    "allenai/Olmo-3-7B-Instruct": 7.30e9,
    "allenai/Olmo-3.1-32B-Instruct": 32.2e9,
    "EleutherAI/pythia-6.9b-deduped": 6.86e9,
    "google/gemma-2-9b": 9.24e9,
    "google/gemma-3-1b-it": 1.00e9,
    "HuggingFaceTB/SmolLM3-3B": 3.08e9,
    "ibm-granite/granite-3.3-8b-instruct": 8.17e9,
    "meta-llama/Llama-3.1-8B": 8.03e9,
    "meta-llama/Llama-3.2-1B-Instruct": 1.24e9,
    "meta-llama/Llama-3.3-70B-Instruct": 70.6e9,
    "microsoft/Phi-3.5-mini-instruct": 3.82e9,
    "microsoft/Phi-4-mini-instruct": 3.84e9,
    "microsoft/phi-4": 14.7e9,
    "mistralai/Mistral-7B-v0.1": 7.24e9,
    "mistralai/Mistral-Nemo-Base-2407": 12.2e9,
    "mistralai/Mixtral-8x7B-v0.1": 46.7e9,
    "openai-community/gpt2": 124.4e6,
    "openai/gpt-oss-120b": 116.8e9,
    "openai/gpt-oss-20b": 20.9e9,
    "Qwen/Qwen1.5-MoE-A2.7B": 14.3e9,
    "Qwen/Qwen2.5-7B-Instruct": 7.62e9,
    "Qwen/Qwen3-0.6B": 0.596e9,
    "Qwen/Qwen3-235B-A22B": 235e9,
    "Qwen/Qwen3-30B-A3B": 30.5e9,
    "Qwen/Qwen3-32B": 32.8e9,
    "Qwen/Qwen3-8B": 8.19e9,
}
"""Model → its number of parameters as model cards and checkpoints give it; shared embeddings count once."""
CONFIGS = {
    path.stem.replace("__", "/"): json.loads(path.read_text())
    for path in (Path(__file__).parents[1] / "public_configs").glob("*.json")
}
SERVED = [name for name in PUBLISHED if CONFIGS[name]["config"]["architectures"][0] in BY_ARCHITECTURE]


def test_every_config_names_its_source_and_every_family_has_one():
    assert CONFIGS.keys() == PUBLISHED.keys()
    assert all(file["source"] for file in CONFIGS.values())
    assert BY_ARCHITECTURE.keys() <= {file["config"]["architectures"][0] for file in CONFIGS.values()}


@pytest.mark.parametrize("name", SERVED)
def test_a_public_config_means_the_published_number_of_parameters(name):
    config = config_from_hf(CONFIGS[name]["config"], Path("config.json"))
    mesh = device_mesh(jax.devices("cpu")[:1])

    def num_parameters(num_layers: int) -> int:
        cut = replace(config, ropes=config.ropes[:num_layers], windows=config.windows[:num_layers])
        return abstract_weights(cut, "bfloat16", mesh).size_bytes // 2

    # All layers of a model have equal weights, and a model of 80 layers takes half a second to make.
    found = num_parameters(1) + (config.num_layers - 1) * (num_parameters(2) - num_parameters(1))
    assert found == pytest.approx(PUBLISHED[name], rel=0.005)  # Published numbers are rounded to three digits.
