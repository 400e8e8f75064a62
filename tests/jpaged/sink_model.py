"""A family with sinks and without experts: the tiny model with a sink for each query head and a window on one layer.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.jpaged.sink_model DIRECTORY

The program runs the model in DIRECTORY over all devices, prints the outputs as JSON, and saves it in DIRECTORY/saved.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jpaged import Engine, SamplingParams
from jpaged.models.config.decoder import DecoderConfig
from jpaged.models.config.hf import FULL, num_layers_of, read_layer_types, windows_by_type
from jpaged.models.families import table
from jpaged.models.families.llama import TENSOR_NAMES, read_llama
from jpaged.models.families.table import Family
from jpaged.models.family import ModelFamily
from jpaged.models.fields import Fields
from jpaged.models.weights.saving import save_checkpoint
from jpaged.step import step_sizes

from .fewest_buckets import fewest_buckets
from .tiny_model import CONFIG, SIZES, tensors, write_tiny_model

WINDOW = 8
WINDOWS = WINDOW, None
PROMPT = [2 + (7 * at * at + 3 * at) % 250 for at in range(3 * WINDOW + 7)]
"""Longer than three windows."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, detokenize=False, logprobs=0)
OPTIONS: dict[str, Any] = {**SIZES, "block_size": 4, "long_prefill_token_threshold": 7, "skip_tokenizer_init": True}
"""Prompts come in chunks of 7 tokens."""


class SinkLlama(ModelFamily):
    """Llama with sinks and windows by layer type."""

    tensor_names = TENSOR_NAMES | {"layers.{i}.attention": "model.layers.{i}.self_attn"}

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        layer_types = read_layer_types(fields, [FULL] * num_layers_of(fields))
        windows = windows_by_type(fields, layer_types, fields.integer("sliding_window"))
        return read_llama(fields, windows=windows, has_sinks=True)


@dataclass(frozen=True)
class SinkFamily(Family):
    """The line of the table for `SinkLlama`, which is no part of the package."""

    def load(self) -> type[ModelFamily]:
        return SinkLlama


FAMILY = SinkFamily("SinkLlamaForCausalLM", "sink_llama", "sink_model.SinkLlama")


def sinks(seed: int = 0) -> list[np.ndarray]:
    """Return the sinks of each layer, as float32 [N]; a sum of exponentials of scores is about 30 after 20 tokens."""
    rng = np.random.default_rng(seed)
    shape = CONFIG["num_hidden_layers"], CONFIG["num_attention_heads"]
    return list(rng.uniform(0, 5, shape).astype(np.float32))


def sink_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Return the tensors of the model, with the sinks of `seed`."""
    return tensors() | {f"model.layers.{layer}.self_attn.sinks": each for layer, each in enumerate(sinks(seed))}


def write_sink_model(directory: Path) -> Path:
    """Write the model to `directory`."""
    config = {"architectures": [FAMILY.architecture], "model_type": FAMILY.model_type, "sliding_window": WINDOW}
    write_tiny_model(directory, **config, layer_types=["sliding_attention", "full_attention"])
    save_file(sink_tensors(), str(directory / "model.safetensors"))
    return directory


def drawn(engine: Engine) -> tuple[list[int], list[float]]:
    """Return the tokens that follow PROMPT, and their logprobs."""
    sample = engine.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0]
    logprobs = [at[token].logprob for token, at in zip(sample.token_ids, sample.logprobs or [], strict=True)]
    return list(sample.token_ids), logprobs


def main() -> None:
    table.BY_ARCHITECTURE[FAMILY.architecture] = FAMILY
    step_sizes.make_buckets = fewest_buckets
    directory = Path(sys.argv[1])
    with Engine(str(directory), **OPTIONS, tensor_parallel_size=jax.device_count()) as engine:
        tokens, logprobs = drawn(engine)
        save_checkpoint(engine.runner.weights, directory / "saved", format="safetensors")
    print(json.dumps({"tokens": tokens, "logprobs": logprobs}))


if __name__ == "__main__":
    main()
