"""Weights are loaded slice by slice with the right values and no second copy, and a bad checkpoint is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jpaged.models.errors import ModelLoadError
from jpaged.models.formats.safetensors_checkpoint import SafetensorsCheckpoint
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.weights.loading import abstract_weights, check_tensors, load_weights
from jpaged.models.weights.weight_memory import WeightMemory
from jpaged.models.weights.weights import Weights
from jpaged.pallas_kernels.layer_ops import XLA_OPS, LayerOps
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.sharding import device_mesh

from .processes import HAS_PROC, peak_bytes, run_python

LLAMA = Path(__file__).parents[2] / "golden" / "families" / "llama"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
TIED = ("model.embed_tokens.weight", "lm_head.weight")


def load(directory: Path, dtype: str = "float32", ops: LayerOps = NATIVE_OPS) -> Weights:
    config, checkpoint = open_checkpoint(directory)
    abstract = abstract_weights(config, dtype, device_mesh(jax.devices()[:1]), ops)
    check_tensors(abstract, config, checkpoint)
    return load_weights(abstract, config, checkpoint)


def as_stored(param: nnx.Param[Any]) -> np.ndarray:
    """Return a weight in the checkpoint's layout, in which matrices are [out, in]."""
    if "matrix" not in param.get_metadata():
        return np.asarray(param[...])
    num_in, num_out = param.matrix
    return np.asarray(param.ops.columns(param[...], jnp.arange(num_out), num_in))


def changed(tmp_path: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    """Return a directory with a copy of the checkpoint LLAMA, whose tensors `change` has changed."""
    tensors = load_file(LLAMA / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((LLAMA / "config.json").read_text())
    return tmp_path


@pytest.mark.parametrize("ops", [NATIVE_OPS, XLA_OPS], ids=["native", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_is_loaded_bit_for_bit_and_projections_of_one_input_side_by_side(
    dtype: str, ops: LayerOps
) -> None:
    """The checkpoint is bfloat16, which both dtypes hold exactly."""
    weights, tensors = load(LLAMA, dtype, ops), load_file(LLAMA / "model.safetensors")
    model = nnx.merge(weights.graph, weights.state)
    attention, mlp = model.layers[1].attention, model.layers[1].mlp
    loaded = {
        ("model.embed_tokens",): model.embed.weight,
        ("lm_head",): model.head.weight,
        ("model.norm",): model.norm.weight,
        ("model.layers.1.post_attention_layernorm",): model.layers[1].mlp_norm.weight,
        ("model.layers.1.mlp.down_proj",): mlp.down_proj.weight,
        tuple(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up")): mlp.gate_up_proj.weight,
        tuple(f"model.layers.1.self_attn.{name}_proj" for name in "qkv"): attention.qkv_proj.weight,
    }
    for names, param in loaded.items():
        stored = np.concatenate([tensors[f"{name}.weight"].astype(np.float32) for name in names])
        assert param[...].dtype == jnp.dtype(dtype)
        assert np.array_equal(as_stored(param).astype(np.float32), stored), names


def test_progress_counts_every_tensor() -> None:
    config, checkpoint = open_checkpoint(LLAMA)
    seen: list[tuple[int, int]] = []
    abstract = abstract_weights(config, "float32", device_mesh(jax.devices()[:1]))
    load_weights(abstract, config, checkpoint, progress=lambda done, total: seen.append((done, total)))
    total = len(checkpoint.names())
    assert seen == [(done, total) for done in range(1, total + 1)]


BAD = {
    "missing": (lambda t: t.pop(Q_PROJ), f"tensor {Q_PROJ} is missing (1 of 21 are)"),
    "left over": (lambda t: t.update({"lm_head.bias": np.zeros(96)}), "tensor lm_head.bias has no place in the model"),
    "other names": (
        lambda t: [t.update({f"a.{name}": t.pop(name)}) for name in list(t)],
        "tensor lm_head.weight is missing (21 of 21 are); the checkpoint holds 'a.lm_head.weight': give the tensors",
    ),
    "wrong shape": (
        lambda t: t.update({Q_PROJ: t[Q_PROJ][:32].copy()}),
        f"tensor {Q_PROJ} has shape (32, 64), the config asks for (64, 64)",
    ),
    "NaN": (lambda t: t[Q_PROJ].__setitem__((9, 3), np.nan), f"tensor {Q_PROJ} holds a NaN or an infinity"),
    "infinity": (lambda t: t[Q_PROJ].__setitem__((9, 3), -np.inf), f"tensor {Q_PROJ} holds a NaN or an infinity"),
}


@pytest.mark.parametrize(("change", "wanted"), BAD.values(), ids=BAD.keys())
def test_a_bad_checkpoint_is_refused_by_the_name_of_its_tensor(
    change: Callable[[dict[str, np.ndarray]], Any], wanted: str, tmp_path: Path
) -> None:
    directory = changed(tmp_path, change)
    with pytest.raises(ModelLoadError, match=re.escape(f"{directory}: {wanted}")):
        load(directory)


def test_known_tensors_that_are_not_weights_are_ignored(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    assert load(changed(tmp_path, lambda t: t.update(extra))).size_bytes == load(LLAMA).size_bytes


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_tied_model_may_store_its_matrix_twice(is_equal: bool, tmp_path: Path) -> None:
    """If the two differ, it has two matrices, whatever its config says."""
    head = {"lm_head.weight": load_file(LLAMA / "model.safetensors")["model.embed_tokens.weight"].copy()}
    if not is_equal:
        head["lm_head.weight"][-1, -1] += 1
    directory = changed(tmp_path, lambda t: t.update(head))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert load(directory).size_bytes == load(LLAMA).size_bytes - 4 * 96 * 64 * is_equal


def test_tied_matrices_are_compared_many_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a vocabulary that is much larger than the width."""
    counts: list[int] = []
    read = SafetensorsCheckpoint.read

    def recorded(self: SafetensorsCheckpoint, name: str, rows: slice, columns: slice = slice(None)) -> np.ndarray:
        counts.append(len(values := read(self, name, rows, columns)))
        return values

    monkeypatch.setattr(SafetensorsCheckpoint, "read", recorded)
    matrices = {name: np.zeros((1 << 18, 8), np.float32) for name in TIED}
    save_file(matrices, tmp_path / "model.safetensors")
    sizes = {"vocab_size": 1 << 18, "hidden_size": 8, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(json.loads((LLAMA / "config.json").read_text()) | sizes))
    assert open_checkpoint(tmp_path)[0].tie_word_embeddings
    assert counts == [1 << 17] * 4


@pytest.mark.parametrize("shape", [(), (96,), (96, 8, 8)])
def test_tied_tensors_that_are_no_matrices_are_refused_by_their_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    directory = changed(tmp_path, lambda t: t.update({name: np.zeros(shape, np.float32) for name in TIED}))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(ModelLoadError, match=re.escape(f"{TIED[0]} has shape {shape}, the config asks for (96, 64)")):
        load(directory)


def test_jax_aliases_the_loaders_buffers_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU then holds no second copy of the weights."""
    buffers: list[int] = []
    allocate = WeightMemory.allocate

    def recorded(self: WeightMemory, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        buffers.append((array := allocate(self, shape, dtype)).ctypes.data)
        return array

    monkeypatch.setattr(WeightMemory, "allocate", recorded)
    leaves = jax.tree.leaves(load(LLAMA).state)
    assert sorted(leaf.unsafe_buffer_pointer() for leaf in leaves) == sorted(buffers)


SHARDED = """
import json, sys
from pathlib import Path
import jax, numpy as np
from flax import nnx
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.formats.safetensors_checkpoint import SafetensorsCheckpoint
from jpaged.models.weights.loading import abstract_weights, load_weights
from jpaged.sharding import device_mesh

class Recorded(SafetensorsCheckpoint):
    read_rows = {}
    def read(self, name, rows, columns=slice(None)):
        self.read_rows.setdefault(name, []).append((rows.start, rows.stop))
        return super().read(name, rows, columns)

config, _ = open_checkpoint(Path(sys.argv[1]))
checkpoint = Recorded(Path(sys.argv[1]))
weights = load_weights(abstract_weights(config, "float32", device_mesh(jax.devices())), config, checkpoint)
model = nnx.merge(weights.graph, weights.state)
arrays = {
    "qkv_proj": model.layers[0].attention.qkv_proj.weight[...], "o_proj": model.layers[0].attention.o_proj.weight[...],
    "embed": model.embed.weight[...], "norm": model.norm.weight[...],
}
print(json.dumps({
    "read": checkpoint.read_rows,
    "shards": {name: [shard.data.shape for shard in a.addressable_shards] for name, a in arrays.items()},
    "sums": {name: float(np.asarray(a).astype(np.float64).sum()) for name, a in arrays.items()},
    "qkv_proj": np.asarray(arrays["qkv_proj"]).tolist(), "o_proj": np.asarray(arrays["o_proj"]).tolist(),
}))
"""


def test_two_devices_read_and_hold_their_own_slices() -> None:
    """Each row of an output-sharded matrix is read once, by its device; an input-sharded matrix is cut by columns."""
    result = run_python(SHARDED, str(LLAMA), flags="--xla_force_host_platform_device_count=2")
    found = json.loads(result.stdout)
    tensors = load_file(LLAMA / "model.safetensors")
    prefix = "model.layers.0.self_attn."
    assert found["shards"] == {
        "qkv_proj": [[64, 64], [64, 64]], "o_proj": [[32, 64], [32, 64]], "embed": [[48, 64], [48, 64]],
        "norm": [[64], [64]],
    }  # fmt: skip
    assert sorted(found["read"][prefix + "q_proj.weight"]) == [[0, 32], [32, 64]]
    assert sorted(found["read"]["model.embed_tokens.weight"]) == [[0, 48], [48, 96]]
    q, k, v, o = (tensors[f"{prefix}{name}_proj.weight"].astype(np.float32).T for name in "qkvo")
    assert np.array_equal(np.array(found["o_proj"], np.float32), o)
    # Each device holds half of q, of k and of v, so that the queries of a head lie beside its keys and values.
    halves = [half for index in range(2) for half in (np.split(part, 2, axis=1)[index] for part in (q, k, v))]
    assert np.array_equal(np.array(found["qkv_proj"], np.float32), np.concatenate(halves, axis=1))


LOAD_DEFAULT_MODEL = """
import sys, jax
from jpaged.startup.model_source import resolve_model
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.weights.loading import abstract_weights, check_tensors, load_weights
from jpaged.sharding import device_mesh
config, checkpoint = open_checkpoint(resolve_model("smollm2-135m").path)
abstract = abstract_weights(config, "float32", device_mesh(jax.devices()))
check_tensors(abstract, config, checkpoint)
jax.numpy.zeros(1).block_until_ready()
print(abstract.size_bytes, flush=True)
sys.stdin.readline()
weights = load_weights(abstract, config, checkpoint)
jax.block_until_ready(jax.tree.leaves(weights.state))
print("done", flush=True)
"""


@pytest.mark.skipif(not HAS_PROC, reason="reads /proc")
def test_loading_takes_little_more_memory_than_the_weights() -> None:
    """At most 1.3 × the bytes of the weights is promised as the peak of anonymous memory; 1.03 is usual.

    The bound of 1.15 lies between the two; reading the embedding in one piece (1.2) would exceed it.
    """
    ((weights_bytes, peak),) = peak_bytes(LOAD_DEFAULT_MODEL)
    assert weights_bytes <= peak <= 1.15 * weights_bytes
