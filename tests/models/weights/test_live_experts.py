"""Trees of a sparse model become the very weights that loading gives, with experts apart or in one array."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged import Engine, ModelLoadError, SamplingParams
from jpaged.models.formats.tree_checkpoint import TreeCheckpoint
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.weights.at_load import QuantizedCheckpoint
from jpaged.models.weights.coded import stored_formats
from jpaged.models.weights.live_weights import LiveWeights
from jpaged.models.weights.loading import abstract_weights, load_weights, tensor_shapes
from jpaged.models.weights.saving import save_checkpoint
from jpaged.models.weights.weights import Weights
from jpaged.pallas_kernels.layer_ops import XLA_OPS, LayerOps
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend
from jpaged.pallas_kernels.tpu_ops import TPU_OPS
from jpaged.sharding import device_mesh

from ...expert_models import in_memory_of_transformers, of_all_experts, of_all_layers
from ...jpaged.tiny_model import SIZES
from .processes import run_over_devices
from .test_live_weights import GOLDEN, MESH, compiled, tensors_of


def live_and_loaded(
    name: str,
    ops: LayerOps = XLA_OPS,
    dtype: str = "float32",
    *,
    quantization: str | None = None,
    num_devices: int = 1,
) -> tuple[LiveWeights, Weights]:
    config, _ = open_checkpoint(GOLDEN / name)
    checkpoint = TreeCheckpoint(tensors_of(name))
    if quantization is not None:
        checkpoint = QuantizedCheckpoint(checkpoint, quantization)
    mesh = device_mesh(jax.devices("cpu")[:num_devices])
    abstract = abstract_weights(config, dtype, mesh, ops, stored_formats(checkpoint))
    return LiveWeights(abstract, mesh), load_weights(abstract, config, checkpoint)


def check_equal(made: Weights, loaded: Weights) -> None:
    for (path, leaf), (_, wanted) in zip(nnx.to_flat_state(made.state), nnx.to_flat_state(loaded.state), strict=True):
        assert (leaf.dtype, leaf.sharding) == (wanted.dtype, wanted.sharding)
        assert np.array_equal(np.asarray(leaf[...]), np.asarray(wanted[...])), path


STORED = {"xla": (XLA_OPS, "float32"), "native": (NATIVE_OPS, "bfloat16"), "tpu": (TPU_OPS, "float32")}
FAST = ("xla", "qwen3_moe_some_dense_window"), ("native", "gpt_oss"), ("tpu", "qwen3_moe_some_dense_window")
"""Ways to store the weights, and the models that every run gives each of them."""


@pytest.mark.parametrize(
    ("ops", "dtype", "name"),
    [
        pytest.param(*STORED[ops], name, id=f"{ops}-{name}", marks=[pytest.mark.slow] * ((ops, name) not in FAST))
        for ops in STORED
        for name in ("mixtral", "qwen3_moe_some_dense_window", "gpt_oss")
    ],
)
def test_a_tree_becomes_what_is_loaded_in_the_memory_of_the_old_weights(ops: LayerOps, dtype: str, name: str) -> None:
    """Layers and experts are apart, or together in one array each or in one for both; some layers have no experts."""
    live, loaded = live_and_loaded(name, ops, dtype)
    tensors, program = tensors_of(name), compiled(live)
    trees = [tensors, of_all_layers(tensors)]
    if name != "gpt_oss":  # Its own tensors are those of all experts.
        of_all, in_memory = of_all_experts(tensors), in_memory_of_transformers(tensors)
        trees += [of_all, of_all_layers(of_all), in_memory, of_all_layers(in_memory)]
    made = live.weights(live.check(loaded.state), program)
    check_equal(made, loaded)
    for number, tree in enumerate(trees):
        on_device = jax.tree.map(jnp.asarray, tree) if number % 2 else tree
        old = {path: leaf[...] + 1 for path, leaf in nnx.to_flat_state(made.state)}
        new = {each.path: each.array for each in live.make(live.check(on_device), program, take=old.get, copy=True)}
        assert all(leaf.is_deleted() for leaf in old.values()), "their memory is that of the new ones"
        leaves = [(path, leaf.replace(new[path])) for path, leaf in nnx.to_flat_state(made.state)]
        check_equal(Weights(made.graph, nnx.from_flat_state(leaves), None, ()), loaded)


def test_programs_are_as_many_for_each_number_of_experts_and_take_the_tensors_of_one() -> None:
    live, _ = live_and_loaded("qwen2_moe")
    program, keys = compiled(live), list()
    live.weights(live.check(tensors_of("qwen2_moe")), lambda key: keys.append(key) or program(key))
    per_key = {key: keys.count(key) for key in keys}
    num_experts = live.abstract.config.experts.num_experts
    assert num_experts == 60
    put = [key for key, count in per_key.items() if count >= num_experts]
    assert len(put) == 2, "one for gate and up, and one for down"
    for key in put:
        arrays, _, tensors, *_ = program(key).args_info[0]
        assert len(jax.tree.leaves(arrays)) == 1
        assert len(jax.tree.leaves(tensors)) <= 2


@pytest.mark.parametrize(
    "quantization", ["int8", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fp8", "int4"))]
)
@pytest.mark.parametrize("ops", [XLA_OPS, NATIVE_OPS, TPU_OPS], ids=["xla", "native", "tpu"])
def test_experts_are_quantized_to_the_codes_that_loading_makes(ops: LayerOps, quantization: str) -> None:
    """The inner width is one that bytes of native code have."""
    config, _ = open_checkpoint(GOLDEN / "mixtral")
    assert config.experts is not None
    config = replace(config, experts=replace(config.experts, width=64))
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape).astype("f4") for name, shape in tensor_shapes(config, MESH).items()}
    checkpoint = QuantizedCheckpoint(TreeCheckpoint(tensors), quantization)
    abstract = abstract_weights(config, "float32", MESH, ops, stored_formats(checkpoint))
    live, loaded = LiveWeights(abstract, MESH), load_weights(abstract, config, checkpoint)
    made = live.weights(live.check(of_all_layers(tensors)), compiled(live))
    check_equal(made, loaded)
    leaves = [leaf for path, leaf in nnx.to_flat_state(made.state) if "experts" in path]
    assert all("code_parts" in leaf.get_metadata() for leaf in leaves)


OVER_DEVICES = """
import jax
from jpaged.sharding import device_mesh, replicated
from tests.models.weights.test_live_experts import check_equal, compiled, live_and_loaded, of_all_experts, tensors_of
whole, tree = replicated(device_mesh(jax.devices()[:4])), of_all_experts(tensors_of("mixtral"))
on_devices = {name: jax.device_put(leaf, whole) for name, leaf in tree.items()}
for quantization, arrays in ((None, tree), ("int8", on_devices)):
    live, loaded = live_and_loaded("mixtral", quantization=quantization, num_devices=4)
    check_equal(live.weights(live.check(arrays), compiled(live)), loaded)
"""


def test_experts_are_put_into_their_places_on_several_devices() -> None:
    run_over_devices(4, OVER_DEVICES)


def test_a_missing_expert_is_named_and_forms_are_not_mixed() -> None:
    live, _ = live_and_loaded("mixtral")
    tree = tensors_of("mixtral")
    missing = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    with pytest.raises(ModelLoadError, match=f"missing: {re.escape(missing)};"):
        live.check({name: leaf for name, leaf in tree.items() if name != missing})
    of_all = of_all_experts(tree)
    gates = "model.layers.0.block_sparse_moe.experts.w1.weight"
    with pytest.raises(ModelLoadError, match=rf"{re.escape(gates)} has shape \(3, .* wanted \(4, "):
        live.check({**of_all, gates: of_all[gates][:3]})
    apart = {name: leaf for name, leaf in tree.items() if ".w1." not in name}
    with pytest.raises(ModelLoadError, match="one of an expert and one of all, wanted one form"):
        live.check({**apart, **{name: leaf for name, leaf in of_all.items() if ".w1." in name}})


def test_routers_stay_float32_whatever_dtype_a_tree_has() -> None:
    live, _ = live_and_loaded("mixtral", dtype="bfloat16")
    tree = {name: leaf.astype(jnp.bfloat16) for name, leaf in tensors_of("mixtral").items()}
    made = live.weights(live.check(tree), compiled(live))
    dtypes = {path[-2]: leaf.dtype.name for path, leaf in nnx.to_flat_state(made.state)}
    assert dtypes["router"] == "float32"
    assert {dtype for module, dtype in dtypes.items() if module != "router"} == {"bfloat16"}


@pytest.mark.usefixtures("few_buckets")
@pytest.mark.parametrize(
    ("backend", "quantization", "ops"),
    [
        pytest.param("xla", "int8", XLA_OPS, marks=pytest.mark.slow),
        ("native", "none", NATIVE_OPS),
        pytest.param("xla", "none", TPU_OPS, marks=pytest.mark.slow),
    ],
    ids=["xla", "native", "tpu"],
)
def test_an_engine_takes_trees_of_experts_sleeps_and_saves_them(
    backend: str, quantization: str, ops: LayerOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees by expert, of transformers' module with layers stacked, and of the engine's own weights give its tokens."""
    if backend == "xla":
        monkeypatch.setattr(XlaBackend, "layer_ops", ops)
    options: dict[str, Any] = SIZES | {
        "max_model_len": 64, "attention_backend": backend, "quantization": quantization, "skip_tokenizer_init": True,
        "num_decode_steps": 1,
    }  # fmt: skip
    tensors = tensors_of("mixtral")

    def drawn(engine: Engine) -> list[Any]:
        outputs = engine.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=6, logprobs=3))
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]

    with Engine(str(GOLDEN / "mixtral"), **options) as engine:
        wanted = drawn(engine)
        engine.sleep(level=2)
        engine.wake_up()
        assert drawn(engine) == wanted
        engine.update_params({name: leaf * 2 for name, leaf in tensors.items()})
        assert drawn(engine) != wanted
        engine.update_params(of_all_layers(in_memory_of_transformers(tensors)))
        assert drawn(engine) == wanted
        own = jax.tree.map(jnp.copy, engine.params)
        engine.update_params(of_all_experts({name: leaf * 2 for name, leaf in tensors.items()}))
        engine.sleep(level=1)
        engine.wake_up()
        assert drawn(engine) != wanted
        engine.update_params(own, copy=False)
        assert drawn(engine) == wanted
        assert engine.stats()["recompiles"] == 0
        save_checkpoint(engine.runner.weights, tmp_path / "saved")
    with Engine(str(tmp_path / "saved"), **(options | {"quantization": "none"})) as engine:
        assert [tokens for tokens, _ in drawn(engine)] == [tokens for tokens, _ in wanted]
