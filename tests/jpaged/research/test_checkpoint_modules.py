"""A checkpoint as a module: its logits are the engine's, its gradients right, and its parameters the checkpoint's.

The golden models are those that transformers wrote, with the logits that it computed (tests/models/families).
"""

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
import transformers
from flax import nnx
from safetensors.numpy import load_file

from jpaged import CheckpointModule, ConfigError, Engine, ModelLoadError, SamplingParams, load_module, save_checkpoint
from jpaged.models.dense import DenseAttention, dense_logprobs
from jpaged.models.inputs import unpaged_inputs

from ... import quick_compile
from ...expert_models import in_memory_of_transformers, of_all_layers
from ..tiny_model import write_tiny_model
from .test_trained_modules import SIZES as OWN_SIZES
from .test_trained_modules import Normed

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "families"
FAMILIES = ("llama_tied", "qwen2", "phi3_longrope_long", "gpt2", "gpt_neox", "gemma2", "gpt_oss", "qwen3_moe")
"""A tied matrix, biases, fused tensors, transposed ones, ones fused head by head, two soft caps, experts in tensors
of all and of one."""
RENAMED: dict[str, Callable[[str], str]] = {
    "gpt2": "transformer.{}".format,
    "gpt_neox": lambda key: key.replace("embed_out", "lm_head"),
}
"""Family → transformers' name of a parameter, for one in a file, where the two differ."""
FAST = ("phi3_longrope_long",)
"""Families for every run."""
MAX_LEN = 64
SIZES: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": MAX_LEN, "block_size": 8, "num_blocks": 33,
    "warmup": "off", "skip_tokenizer_init": True,
}  # fmt: skip
by_family = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in FAMILIES]
)
ATOL = 1e-4
NUM_ENTRIES = 20
STEP = 0.03
"""Step of finite differences, as a share of the tensor's root mean square."""
MAX_RANK = 5
"""How many entries of a tensor are tried at most, the steepest first."""
RTOL = 2e-3
"""Of the steps from 0.001 to 0.1 the error of STEP is the least: rounding in float32 and the fourth power of the step
make up to 5e-4 of a derivative together."""


def opened(name: str, **options: Any) -> tuple[CheckpointModule, np.ndarray]:
    """Return a golden model as a module, and a sequence [1, N]."""
    tokens = load_file(GOLDEN / name / "golden.safetensors")["tokens"]
    return load_module(GOLDEN / name, max_model_len=MAX_LEN, **options), tokens[None]


def logprobs_of(logits: Any, ids: Any) -> jax.Array:
    """Return the logprobs [B, N − 1] of the tokens after the first."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), jnp.asarray(ids)[:, 1:, None], 2)[..., 0]


@nnx.jit
def forward(module: CheckpointModule, ids: Any) -> jax.Array:
    return module(ids)


@nnx.jit
def loss_and_gradients(module: CheckpointModule, ids: Any) -> tuple[jax.Array, Any]:
    return nnx.value_and_grad(lambda module: -logprobs_of(module(ids), ids).mean())(module)


@nnx.jit
def logits_and_choices(module: CheckpointModule, ids: Any) -> tuple[jax.Array, jax.Array | None]:
    """Return the logits [N, V] of one sequence [1, N] and, as 0 or 1, whether each token chooses each expert of a layer
    [N, L, E]; None without experts."""
    decoder, inputs = module.decoder(), unpaged_inputs(ids[0], jnp.arange(ids.shape[1]))

    def logits_and_counts(counted: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        hidden, _, counts = decoder.with_expert_tokens(replace(inputs, counted=counted), DenseAttention(1))
        return decoder.logits(hidden), counts

    tokens = jnp.eye(ids.shape[1], dtype=bool)
    return logits_and_counts(tokens[0])[0], jax.lax.map(lambda token: logits_and_counts(token)[1], tokens)


def steepest_of_experts(gradients: Mapping[Any, np.ndarray], choices: jax.Array | None) -> dict[Any, np.ndarray]:
    """Return the gradients of all tensors but those of single experts, and of these the steepest expert's alone.

    The gradients of experts that no token chooses, and only these, must be zero.
    """
    steepest = dict[str, tuple[Any, np.ndarray]]()
    for path, gradient in gradients.items():
        name = ".".join(path)
        if match := re.search(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.", name):
            assert gradient.any() == np.asarray(choices)[:, int(match[1]), int(match[2])].any(), name
            name = name.replace(f"experts.{match[2]}.", "experts.")
        if name not in steepest or np.abs(gradient).max() > np.abs(steepest[name][1]).max():
            steepest[name] = path, gradient
    return dict(steepest.values())


@by_family
def test_dense_logits_are_the_engines_before_and_after_updates_from_the_training_state(name, few_buckets):
    """By its parameters, and by a training state with momentum under the same names; no step is compiled anew."""
    module, ids = opened(name)
    optimizer = nnx.Optimizer(module, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    trees = (lambda: nnx.state(module, nnx.Param), lambda: nnx.state((module, optimizer)), module.hf_state)
    losses = []
    with Engine(str(GOLDEN / name), **SIZES) as engine:
        for tree in (None, *trees):
            if tree is not None:
                loss, gradients = loss_and_gradients(module, ids)
                nnx.jit(lambda *given: given[0].update(*given[1:]))(optimizer, module, gradients)
                losses.append(loss)
                engine.update_params(tree())
            ours = logprobs_of(forward(module, ids), ids)
            np.testing.assert_allclose(engine.logprobs(ids), ours, rtol=0, atol=ATOL)
        assert engine.stats()["recompiles"] == 0
    assert losses[0] > losses[1] > losses[2]


@by_family
def test_logits_are_those_of_transformers_and_gradients_finite_differences(name):
    """Of 20 entries, the steepest of their tensors; the sum of the loss is in float64.

    Entries whose steps change which experts a token chooses are left out: the loss jumps there, and has no slope.
    """
    module, ids = opened(name)
    # Else a training step would be compiled a second time for the outputs of the first.
    assert not any(array.committed for array in module.hf_state().values())
    wanted = load_file(GOLDEN / name / "golden.safetensors")["logits"]
    np.testing.assert_allclose(forward(module, ids)[0], wanted, rtol=0, atol=ATOL)
    graph, state = nnx.split(module)
    flat, choices = dict(nnx.to_flat_state(state)), logits_and_choices(module, ids)[1]
    leaves = nnx.to_flat_state(loss_and_gradients(module, ids)[1])
    gradients = list(
        steepest_of_experts({path: np.asarray(leaf.get_value()) for path, leaf in leaves}, choices).items()
    )

    def loss_with(path: Any, entry: Any, step: float) -> tuple[float, float] | None:
        """Return the loss with one entry of a parameter changed by a step, and the entry as float32 has it; None if a
        token chooses other experts."""
        values = np.array(flat[path].get_value())
        values[entry] += step
        changed = nnx.from_flat_state({**flat, path: flat[path].replace(jnp.asarray(values))})
        logits, found = logits_and_choices(nnx.merge(graph, changed), ids)
        if found is not None and not np.array_equal(found, choices):
            return None
        logits = np.asarray(logits)[:-1].astype(np.float64)
        chosen = logits[np.arange(len(logits)), ids[0, 1:]] - np.log(np.exp(logits).sum(axis=1))
        return -chosen.mean(), float(values[entry])

    def slope(path: Any, entry: Any, step: float) -> float | None:
        above, below = (loss_with(path, entry, sign * step) for sign in (1, -1))
        return None if above is None or below is None else (above[0] - below[0]) / (above[1] - below[1])

    order = np.random.default_rng(0).permutation(len(gradients))
    num_compared = 0
    for rank, index in itertools.product(range(MAX_RANK), order):
        if num_compared == NUM_ENTRIES:
            break
        path, gradient = gradients[index]
        entry = np.unravel_index(np.argsort(np.abs(gradient), axis=None)[-1 - rank], gradient.shape)
        step = STEP * float(np.sqrt(np.square(np.asarray(flat[path].get_value())).mean()))
        if None in (slopes := [slope(path, entry, step), slope(path, entry, 2 * step)]):
            continue
        wanted = (4 * slopes[0] - slopes[1]) / 3  # Richardson's extrapolation leaves an error of the fourth order.
        assert gradient[entry] == pytest.approx(wanted, rel=RTOL), path
        assert abs(wanted) > 1e-3
        num_compared += 1
    assert num_compared == NUM_ENTRIES


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_the_tensors_of_the_checkpoint_both_ways(name, tmp_path):
    """One by one, stacked by layer, and as a directory that has what transformers wrote."""
    module, stored = opened(name)[0], load_file(GOLDEN / name / "model.safetensors")
    wanted = {RENAMED.get(name, str)(key): values for key, values in stored.items() if not key.endswith(".attn.bias")}
    config = json.loads((GOLDEN / name / "config.json").read_text())

    def assert_equal(found: Any, factor: float = 1.0) -> None:
        assert found.keys() == wanted.keys()
        for key, values in wanted.items():
            np.testing.assert_array_equal(found[key], factor * values.astype(np.float32), err_msg=key)

    assert_equal(module.hf_state())
    paths = {".".join(path): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    assert_equal({name.removeprefix("params."): values for name, values in paths.items()})
    other = load_module(GOLDEN / name, max_model_len=MAX_LEN)
    stacked = other.hf_state(stacked=True)
    assert len(stacked) < len(wanted)
    assert {len(values) for key, values in stacked.items() if key not in wanted} == {config_layers(config)}
    tripled = {key: 3 * values for key, values in other.hf_state().items()}
    trees = [stacked, {"model_params": tripled}, stacked]
    if name == "qwen3_moe":
        trees += [in_memory_of_transformers(tripled), stacked, of_all_layers(in_memory_of_transformers(tripled))]
    for tree in trees:
        module.load_hf_state(tree)
        assert_equal(module.hf_state(), 1.0 if tree is stacked else 3.0)
    module.load_hf_state(nnx.state(other))
    for array in other.hf_state().values():
        array.delete()  # As a trainer does, which donates them.
    save_checkpoint(module, tmp_path / "saved")
    assert_equal(load_file(tmp_path / "saved" / "model.safetensors"))
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved == {**config, "dtype": "float32"}
    assert transformers.AutoConfig.from_pretrained(tmp_path / "saved").architectures == config["architectures"]


def config_layers(config: dict[str, Any]) -> int:
    return config.get("num_hidden_layers") or config["n_layer"]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="transformers computes no logits without torch")
@by_family
def test_transformers_opens_what_was_trained_and_saved(name, tmp_path):
    torch = importlib.import_module("torch")
    module, ids = opened(name)
    nnx.update(module, jax.tree.map(lambda leaf: leaf * 0.9, nnx.state(module)))
    save_checkpoint(module, tmp_path / "saved")
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids).long()).logits.numpy()
    np.testing.assert_allclose(forward(module, ids), logits, rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", ["mistral_window", "gpt2"])
def test_padding_changes_nothing(name):
    """Mistral's windows and GPT-2's embedding count positions."""
    module, ids = opened(name)
    ids = ids[:, :56]
    padded, mask = (np.pad(one, ((0, 0), (5, 3))) for one in (ids, np.ones_like(ids)))
    logits = nnx.jit(lambda module: module(padded, mask))(module)
    np.testing.assert_allclose(logits[:, 5:-3], forward(module, padded[:, 5:])[:, :-3], rtol=0, atol=ATOL)


def test_parameters_and_computations_have_the_dtypes_that_were_asked_for():
    plain, ids = opened("mistral_window")
    mixed = opened("mistral_window", compute_dtype="bfloat16")[0]
    narrow = opened("mistral_window", dtype=jnp.bfloat16)[0]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loss_and_gradients(mixed, ids))} == {"float32"}
    assert 100 * ATOL < np.abs(forward(mixed, ids) - forward(plain, ids)).max() < 1, "bfloat16 has 8 bits"
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(narrow))} == {"bfloat16"}
    np.testing.assert_array_equal(forward(narrow, ids), forward(mixed, ids))


def test_a_directory_with_a_tokenizer_is_saved_whole_and_served(tmp_path, few_buckets):
    """The engine reads text again. In bfloat16 the module that is loaded again has the rounded values."""
    source = write_tiny_model(tmp_path / "source")
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    (source / "notes.txt").write_text("not a model's")
    module = load_module(source)
    save_checkpoint(module, tmp_path / "saved", dtype="bfloat16")
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "saved").iterdir()} == files
    with Engine(tmp_path / "saved", **{**SIZES, "skip_tokenizer_init": False}) as engine:
        assert engine.generate("a", SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].text
        assert engine.handle.sampling_defaults == {"temperature": 0.5}
    for name, values in load_module(tmp_path / "saved").hf_state().items():
        np.testing.assert_array_equal(values, module.hf_state()[name].astype("bfloat16").astype("float32"))
    with pytest.raises(ValueError, match="which is there already, wanted a new or an empty one: give another one, or"):
        save_checkpoint(module, tmp_path / "saved")
    save_checkpoint(module, tmp_path / "saved", overwrite=True)
    assert load_file(tmp_path / "saved" / "model.safetensors")["lm_head.weight"].dtype == np.float32
    assert {path.name for path in tmp_path.iterdir()} == {"source", "saved"}


def test_a_module_of_ones_own_is_written_as_orbax_reads_it(tmp_path, few_buckets):
    """Its running statistics and a scalar are there, its random stream is not."""
    module, other = Normed(), Normed()
    for one in (module, other):
        one.temperature = nnx.Param(jnp.float32(0.25))
    is_weight = nnx.Any(nnx.Param, nnx.BatchStat)
    nnx.update(module, jax.tree.map(lambda leaf: leaf * 0.8 + 0.1, nnx.state(module, is_weight)))
    save_checkpoint(module, tmp_path / "saved")
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "saved")
    with Engine(other, params=tree, **OWN_SIZES) as engine:
        module.eval()
        ids = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6]])
        ours = nnx.jit(dense_logprobs)(module, ids)
        np.testing.assert_allclose(engine.logprobs(ids), ours, atol=1e-5)
    nnx.update(other, nnx.restore_int_paths(tree))
    found, wanted = (nnx.to_flat_state(nnx.state(one, is_weight)) for one in (other, module))
    for (path, ours), (_, theirs) in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours.get_value(), theirs.get_value(), err_msg=str(path))
    with pytest.raises(ValueError, match="wanted a new or an empty one: give another one, or overwrite=True"):
        save_checkpoint(other, tmp_path / "saved")


REFUSED = {
    "no model": (lambda _: load_module("nowhere"), ModelLoadError, "model 'nowhere': no such file or directory"),
    "integers": (lambda path: load_module(path, dtype="int8"), ConfigError, "dtype: got 'int8', allowed: float32, bf"),
    "float64": (lambda path: load_module(path, compute_dtype=float), ConfigError, "compute_dtype: got .*, allowed: fl"),
    "no mesh": (lambda path: load_module(path, mesh=2), ConfigError, "mesh: got 2, allowed: a jax.sharding.Mesh with"),
    "another mesh": (
        lambda path: load_module(path, mesh=jax.make_mesh((1,), ("x",))), ConfigError, "mesh: got the axes x, allowed"
    ),
    "too long": (lambda path: load_module(path, max_model_len=65), ConfigError, "max_model_len: got 65, allowed: at m"),
    "random": (lambda path: load_module(path, load_format="dummy"), ConfigError, "load_format: got dummy, allowed: a "),
    "to serve": (lambda path: Engine(load_module(path)), ConfigError, r"model: got a module .* params=module.hf_state"),
    "no module": (lambda _: save_checkpoint({}, "new"), ConfigError, "module: got dict, allowed: a module of load_mod"),
    "no values": (
        lambda _: save_checkpoint(nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0))), "new"),
        ConfigError, "module: got ShapeDtypeStruct in bias, allowed: arrays of float32",
    ),
    "no directory": (lambda _: save_checkpoint(nnx.Module(), ""), ConfigError, "directory: got '', allowed: the path"),
    "no batch": (lambda path: load_module(path)(jnp.zeros(3, int)), ValueError, r"ids: got the shape \(3,\), wanted"),
    "too many": (lambda path: load_module(path)(jnp.zeros((1, 65), int)), ValueError, "ids: got 65 tokens, wanted at"),
    "missing": (
        lambda path: load_module(path).load_hf_state({"lm_head.weight": np.zeros((96, 64))}),
        ModelLoadError, "params, a tree of tensors: missing: model.embed_tokens.weight, .*lm_head.weight is float64",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call(GOLDEN / "llama")
    assert "\n" not in str(caught.value)
    assert not Path("new").exists()


ON_A_MESH = """
import sys

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from jpaged import load_module

ids = load_file(sys.argv[1] + "/golden.safetensors")["tokens"].reshape(2, -1)
grads = {}
for kind in (None, AxisType.Auto, AxisType.Explicit):
    mesh = kind and jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind, kind))
    module = load_module(sys.argv[1], mesh=mesh)
    given = jax.device_put(ids, mesh and NamedSharding(mesh, PartitionSpec("data")))
    loss = lambda module, ids: (jax.nn.log_softmax(module(ids)) ** 2).mean()
    grads[kind] = nnx.jit(nnx.grad(loss))(module, given)
    for one, first in zip(jax.tree.leaves(grads[kind]), jax.tree.leaves(grads[None]), strict=True):
        np.testing.assert_allclose(one, first, rtol=1e-3, atol=1e-5)
    if mesh is not None:
        layer, embedding = module.params["model"]["layers"]["0"], module.params["model"]["embed_tokens"]
        print(*(
            one["weight"].get_value().sharding.shard_shape(one["weight"].shape)
            for one in (embedding, layer["self_attn"]["q_proj"], layer["mlp"]["down_proj"], layer["input_layernorm"])
        ))
        assert jax.tree.leaves(grads[kind])[0].sharding.mesh.size == 4
"""


@pytest.mark.slow
def test_on_a_mesh_the_gradients_are_those_of_one_device():
    """With axes of either type, and a batch that is spread over another axis of the mesh."""
    flags = "--xla_force_host_platform_device_count=4"
    environment = {**quick_compile.environment(flags), "NPROC": "8"}
    command = [sys.executable, "-c", ON_A_MESH, str(GOLDEN / "llama")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines() == 2 * ["(48, 64) (32, 64) (64, 40) (64,)"]


@pytest.mark.slow
def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch):
    """On a tiny model; optax mixes dtypes."""
    text = (ROOT / "docs" / "research.md").read_text().split("## A checkpoint as a module")[1]
    lines = text.split("```python")[1].split("```")[0].replace("smollm2-135m", str(GOLDEN / "llama"))
    monkeypatch.chdir(tmp_path)
    ids = load_file(GOLDEN / "llama" / "golden.safetensors")["tokens"].reshape(2, -1)
    with Engine(str(GOLDEN / "llama"), **SIZES) as engine, jax.numpy_dtype_promotion("standard"):
        exec(lines, {"engine": engine, "ids": ids})
        trained = load_module(tmp_path / "trained")
        np.testing.assert_allclose(engine.logprobs(ids), logprobs_of(forward(trained, ids), ids), rtol=0, atol=ATOL)
