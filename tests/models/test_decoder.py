"""What the shared decoder gives its layers: their index, and the inputs of the step."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.config.decoder import DecoderConfig
from jpaged.models.decoder import Decoder, DecoderLayer
from jpaged.models.dense import dense_logits
from jpaged.models.experts import LayerOutput
from jpaged.models.layers import WeightMaker
from jpaged.models.opening.open_checkpoint import read_config

SMOLLM3 = Path(__file__).parents[1] / "golden" / "families" / "smollm3"


def small(layer: type[DecoderLayer]) -> tuple[Decoder, DecoderConfig]:
    """Return a model of four layers of this class, with random weights."""
    config, rng = read_config(SMOLLM3), np.random.default_rng(0)
    make = WeightMaker(lambda shape, axes, fill: jnp.asarray(rng.normal(size=shape), "float32"), 1, "float32")
    return type("Model", (Decoder,), {"layer_class": layer})(config, make=make), config


def test_a_layer_is_made_with_its_index_and_sees_the_inputs_in_one_trace_for_all() -> None:
    made: list[int] = []
    traced: list[str] = []

    class Layer(DecoderLayer):
        """A layer that passes over tokens with the id 7."""

        def __init__(self, config: DecoderConfig, index: int, *, make: WeightMaker) -> None:
            super().__init__(config, index, make=make)
            made.append(index)

        @jax.jit
        def before(self, x_TD: Any, rotation: Any, inputs: Any) -> Any:
            traced.append(f"before {inputs.attention.positions.shape}")
            return self.attention.project(self.attention_norm(x_TD), rotation)

        @jax.jit
        def after(self, x_TD: Any, out_TNH: Any, inputs: Any) -> Any:
            traced.append("after")
            added_TD = self.attention.o_proj(out_TNH.reshape(x_TD.shape[0], -1))
            return LayerOutput(x_TD + jnp.where(inputs.token_ids[:, None] == 7, 0, added_TD))

    model, config = small(Layer)
    logits = np.asarray(dense_logits(model, jnp.array([[3, 7, 5]])))[0]
    assert made == list(range(config.num_layers))
    assert len(made) == 4
    # Two, since layers with and without a rotary embedding are called with different arguments.
    assert traced.count("before (3,)") == 2
    assert traced.count("after") == 1
    plain = np.asarray(model.logits(model.norm(model.embed(jnp.array([3, 7, 5])))))
    # Nothing is computed for the token 7, so that sums alone may be ordered otherwise.
    assert [bool(np.abs(logits[token] - plain[token]).max() < 1e-4) for token in range(3)] == [False, True, False]


def test_a_layer_that_returns_the_stream_alone_is_not_taken_for_one_that_counts_experts() -> None:
    class Layer(DecoderLayer):
        """A layer that adds nothing, and gives no `LayerOutput`."""

        def after(self, x_TD: Any, out_TNH: Any, inputs: Any) -> Any:
            return x_TD

    with pytest.raises(AttributeError, match="stream"):
        dense_logits(small(Layer)[0], jnp.array([[3, 7]]))  # Two tokens, as many as a pair has parts.
