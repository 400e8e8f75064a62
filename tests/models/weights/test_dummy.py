"""Random weights: made where they stay, equal on every backend and in both dtypes, and large enough to tell tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.models.opening.reading import config_from_hf
from jpaged.models.weights.dummy import dummy_weights
from jpaged.models.weights.loading import abstract_weights
from jpaged.pallas_kernels.layer_ops import XLA_OPS
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.sharding import device_mesh

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 250, "hidden_size": 72,
    "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def weights(tmp_path, dtype, ops=XLA_OPS, num_devices=1):
    config = config_from_hf(CONFIG, tmp_path / "config.json")
    return dummy_weights(abstract_weights(config, dtype, device_mesh(jax.devices()[:num_devices]), ops))


def arrays(made):
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(made.state)}


def test_gains_are_one_biases_zero_and_matrices_as_wide_as_their_inputs_ask(tmp_path):
    for name, leaf in arrays(weights(tmp_path, "float32")).items():
        values = np.asarray(leaf[...])
        if "norm" in name:
            assert (values == 1).all(), name
        elif name.endswith("bias"):
            assert (values == 0).all(), name
        else:
            num_inputs = leaf.get_metadata().get("matrix", values.shape[::-1])[0]
            assert 0.7 < values.std() * num_inputs**0.5 < 1.45, name
            assert abs(values.mean()) < 0.05 * values.std(), name
    first, second = (arrays(weights(tmp_path, "float32"))[f"layers.{i}.mlp.down_proj.weight"][...] for i in (0, 1))
    assert (first != second).mean() > 0.9, "layers differ"


def test_both_dtypes_hold_the_same_numbers_each_time(tmp_path):
    ours, again, narrow = (arrays(weights(tmp_path, dtype)) for dtype in ("float32", "float32", "bfloat16"))
    for name, leaf in ours.items():
        assert (leaf[...] == again[name][...]).all()
        assert narrow[name][...].dtype == jnp.bfloat16
        assert (leaf[...] == narrow[name][...].astype(jnp.float32)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_panels_hold_the_matrices_that_plain_xla_has_and_zeros_beside_them(tmp_path, dtype):
    panels = arrays(weights(tmp_path, dtype, NATIVE_OPS))
    for name, plain in arrays(weights(tmp_path, dtype)).items():
        metadata = panels[name].get_metadata()
        if "matrix" not in metadata:
            assert (np.asarray(panels[name][...]) == np.asarray(plain[...])).all()
            continue
        num_in, num_out = metadata["matrix"]
        matrix = np.asarray(plain[...])
        rows = matrix.T if "matrix" in plain.get_metadata() else matrix
        wanted = np.full(panels[name][...].shape, np.nan, panels[name][...].dtype)
        _, write = NATIVE_OPS.matrix_rows(wanted, [(0, size) for size in wanted.shape], (num_in, num_out))
        write(0, rows)
        assert np.asarray(panels[name][...]).tobytes() == wanted.tobytes(), name
