"""Serves one model on meshes of a trainer over four virtual devices of a CPU; raises AssertionError where it differs.

    NPROC=8 XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m tests.jpaged.trainer_meshes DIRECTORY

Each engine begins with a trainer's arrays as `params` and is updated by others, all split over the whole mesh. The
oracle is an engine on one device, which gets the same values as numpy. Calls stand inside of `jax.set_mesh` of the
trainer, as its loop does.
"""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from examples import own_model
from jpaged import Engine, EngineConfig, SamplingParams, draw
from jpaged.models.dense import dense_logits, dense_logprobs
from jpaged.startup.open_model import open_model
from jpaged.step import step_sizes

from .fewest_buckets import one_mode

ONE_LAYER: dict[str, Any] = {"hf_overrides": {"num_hidden_layers": 1}, "skip_tokenizer_init": True}
SIZES: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 4, "block_size": 8, "num_blocks": 17, "warmup": "off",
    "max_model_len": 64, "num_decode_steps": 1, "attention_backend": "xla",
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [27, 18, 28]]
FSDP = {"heads": "tp", "mlp": "tp", "vocab": "tp", "embed": "fsdp"}
MODEL = {"heads": "model", "kv_heads": ["model"], "mlp": "model", "vocab": "model", "embed": None}
MESHES: tuple[tuple[dict[str, int], AxisType, dict[str, Any] | None, int], ...] = (
    ({"tp": 4}, AxisType.Auto, None, 4),
    ({"fsdp": 2, "tp": 2}, AxisType.Explicit, FSDP, 2),
    ({"model": 2, "data": 2}, AxisType.Auto, MODEL, 2),
    ({"fsdp": 4}, AxisType.Auto, {"embed": "fsdp"}, 1),
)
"""Axes and sizes of a mesh, their type, the rules, and the number of devices that serve."""
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
"""Matrices [out, in] whose outputs are heads, columns of the MLP or rows of the vocabulary."""
compiled: list[str] = []
"""Events of compilations in this process."""
logged: list[logging.LogRecord] = []


class Log(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        logged.append(record)


def axes_of(name: str, ndim: int, shape: dict[str, int]) -> PartitionSpec:
    """Return how a trainer splits a tensor over a mesh: by its rules, and by FSDP where there is an axis for it."""
    wide = next((axis for axis in ("tp", "model") if axis in shape), None)
    whole = "fsdp" if "fsdp" in shape else None
    if ndim == 1:
        return PartitionSpec(whole)
    return PartitionSpec(wide, whole) if name.split(".")[-2] in COLUMNS else PartitionSpec(whole, wide)


def place(tensor: Any, mesh: Any, axes: Any) -> jax.Array:
    return jax.device_put(tensor, NamedSharding(mesh, PartitionSpec(*axes)))


def stacked(tree: dict[str, np.ndarray], placed: dict[str, jax.Array], mesh: Any) -> dict[str, jax.Array]:
    """Return `placed` with one array [1, …] for its only layer, under names without the layer's number."""
    layers = {
        name: place(tree[name][None], mesh, (None, *placed[name].sharding.spec)) for name in tree if ".0." in name
    }
    rest = {name: array for name, array in placed.items() if name not in layers}
    return rest | {name.replace(".0", ""): array for name, array in layers.items()}


def results(engine: Engine) -> tuple[list[list[int]], np.ndarray]:
    """Return greedy tokens of PROMPTS, and the logprobs of both sequences with them."""
    tokens = [list(output.outputs[0].token_ids) for output in engine.generate(PROMPTS, GREEDY, use_tqdm=False)]
    whole = [prompt + drawn for prompt, drawn in zip(PROMPTS, tokens, strict=True)]
    return tokens, np.asarray(engine.logprobs(whole))


def check(engine: Engine, expected: tuple[list[list[int]], np.ndarray]) -> None:
    tokens, logprobs = results(engine)
    assert tokens == expected[0], (tokens, expected[0])
    np.testing.assert_allclose(logprobs, expected[1], rtol=0, atol=1e-5)


def serve(directory: str, trees: list[dict[str, np.ndarray]], expected: list[Any]) -> None:
    """Serve the model on each of MESHES."""
    for shape, axis_type, rules, num_devices in MESHES:
        mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(axis_type,) * len(shape))
        placed = [
            {name: place(tensor, mesh, axes_of(name, tensor.ndim, shape)) for name, tensor in tree.items()}
            for tree in trees
        ]
        updates = [placed[1], placed[0]]
        if axis_type is AxisType.Explicit:
            # The names of all layers in one array too, of which JAX slices layers.
            updates.insert(1, stacked(trees[0], placed[0], mesh))
        logged.clear()
        options: dict[str, Any] = {"mesh": mesh, "sharding_rules": rules, "params": placed[0]}
        handle = open_model(EngineConfig(model=directory, **options, **ONE_LAYER))
        assert handle.arrays is placed[0], "these weights are gathered on the devices, not read by the host"
        with jax.set_mesh(mesh), Engine(directory, **options, **ONE_LAYER, **SIZES) as engine:
            first = [0, 2, 1, 3] if "model" in shape else [0, 1, 2, 3]
            assert [device.id for device in engine.mesh.devices.flat] == first[:num_devices]
            said = [record.getMessage() for record in logged if "served by" in record.getMessage()]
            assert len(said) == (num_devices < 4), said
            check(engine, expected[0])
            for tree in updates:
                engine.update_params(tree)
                check(engine, expected[tree is placed[1]])
            compiled.clear()
            for tree in updates:
                engine.update_params(tree)
            assert not compiled, "updates of known kinds compile nothing"
            assert engine.stats()["recompiles"] == 0
        # JAX keeps what it has copied to the host.
        assert not [array.shape for array in jax.tree.leaves((placed, updates)) if array._npy_value is not None]


own_model.VOCAB = 96  # One that two devices share out.


class Named(own_model.Tiny):
    """A module whose variables name logical axes, one of them its own, and axes of a mesh, as in Flax."""

    spec = replace(own_model.Tiny.spec, vocab_size=96)

    def __init__(self, *, has_names: bool = True):
        super().__init__(nnx.Rngs(0))
        if not has_names:
            return
        for table in (self.tokens, self.positions):
            table.embedding.set_metadata(logical_axes=("rows", "embed"))
        for block in self.blocks:
            block.up.kernel.set_metadata(out_sharding=PartitionSpec("fsdp", "tp"))
            block.down.kernel.set_metadata(out_sharding=("mlp", "embed"))
            block.qkv.kernel.set_metadata(out_sharding=("embed", None))
            block.out.kernel.set_metadata(out_sharding=("embed", None))


def serve_module() -> None:
    """Serve a module by the names of its variables, and one without names, with arrays on a mesh with explicit axes."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    ids = list(range(1, 30))
    expected, expected_logits = (
        dense_logprobs(Named(), jnp.array([ids]))[0],
        dense_logits(Named(), jnp.array([ids]))[0, :28],
    )
    drawn = draw(expected_logits, 7, 0, np.arange(28), SamplingParams()).tolist()
    for has_names, own_rules, shape in ((True, {"rows": None}, (64, 128)), (False, {}, (64, 256))):
        module = Named(has_names=has_names)
        nnx.update(module, jax.tree.map(lambda array: place(array, mesh, ("fsdp",)), nnx.state(module)))
        logged.clear()
        options: dict[str, Any] = {"mesh": mesh, "sharding_rules": {**FSDP, **own_rules}}
        with jax.set_mesh(mesh), Engine(module, **options, **SIZES) as engine:
            kernel = engine.params["blocks"][0]["up"]["kernel"][...]
            assert kernel.addressable_shards[0].data.shape == shape, kernel.sharding
            for _ in range(2):
                np.testing.assert_allclose(engine.logprobs(ids), expected, rtol=0, atol=1e-5)
                engine.update_params(nnx.state(module))
            sharded = jax.device_put(np.asarray(expected_logits), NamedSharding(mesh, PartitionSpec("fsdp", "tp")))
            assert draw(sharded, 7, 0, np.arange(28), SamplingParams()).tolist() == drawn
        num_bytes = sum(array.nbytes for array in jax.tree.leaves(nnx.state(module, nnx.Param)))
        wanted = [] if has_names else [f"{num_bytes:,} bytes on each of 2 devices"]
        warnings = [record.getMessage() for record in logged if record.levelno >= logging.WARNING]
        assert len(warnings) == len(wanted), warnings
        assert all(words in warning for words, warning in zip(wanted, warnings, strict=True)), warnings


def main() -> None:
    step_sizes.make_buckets = one_mode
    logger = logging.getLogger("jpaged")
    logger.addHandler(Log())
    logger.setLevel(logging.INFO)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **kwargs: compiled.append(event) if "backend_compile" in event else None
    )
    directory = sys.argv[1]
    stored = load_file(Path(directory, "model.safetensors")).items()
    tensors = {name: tensor.astype(np.float32) for name, tensor in stored if ".layers.1." not in name}
    rng = np.random.default_rng(0)
    changed = {name: tensor + rng.normal(0, 0.02, tensor.shape).astype(np.float32) for name, tensor in tensors.items()}
    with Engine(directory, params=tensors, **ONE_LAYER, **SIZES) as engine:
        expected = [results(engine)]
        engine.update_params(changed)
        expected.append(results(engine))
    assert expected[0][0] != expected[1][0]
    serve(directory, [tensors, changed], expected)
    serve_module()


if __name__ == "__main__":
    main()
