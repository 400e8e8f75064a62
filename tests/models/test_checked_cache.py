"""The families' own decoders attend as their specs say, in all layers."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jpaged.models.checked_cache import CheckedCache, check_all_layers_attended
from jpaged.models.config.spec import AttentionLayer
from jpaged.models.dense import DenseAttention
from jpaged.models.inputs import ModelInputs
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.weights.loading import abstract_weights
from jpaged.pallas_kernels.ragged_paged_attention.interface import AttentionMetadata
from jpaged.sharding import device_mesh

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
LAYER = AttentionLayer(num_heads=2, num_kv_heads=1, head_size=8)


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if "_" not in path.name))
def test_a_decoder_attends_as_its_spec_says(name):
    config, _ = open_checkpoint(GOLDEN / name)
    weights = abstract_weights(config, "float32", device_mesh(jax.devices("cpu")[:1]))
    layers = config.spec.layers

    def run(state, ids):
        inputs = ModelInputs(ids, AttentionMetadata(ids, *[jnp.zeros(0, jnp.int32)] * 7))
        hidden, cache = nnx.merge(weights.graph, state)(inputs, CheckedCache(DenseAttention(1), layers))
        check_all_layers_attended(cache, layers)
        return hidden

    ids = jax.ShapeDtypeStruct((4,), jnp.int32)
    assert jax.eval_shape(run, weights.state, ids).shape == (4, config.hidden_size)


def test_calls_are_counted_in_functions_that_jax_has_traced_before():
    """The same function for the same layer is not traced again, and its second call is refused all the same."""
    step = AttentionMetadata(jnp.arange(4), *[jnp.zeros(0, jnp.int32)] * 7)
    attend = jax.jit(lambda cache, x: cache.attend(0, x, x[:, :1], x[:, :1], step, scale=1.0))
    x, cache = jnp.ones((4, 2, 8)), CheckedCache(DenseAttention(1), (LAYER, LAYER))
    for _ in range(2):
        _, after = attend(cache, x)
        assert after.num_attended == 1
    with pytest.raises(ValueError, match="got layer 0 a second time, wanted layer 1"):
        attend(after, x)
