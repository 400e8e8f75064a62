"""A caller's own nnx module behind the engine: the module of the example, compared with its dense forward."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from jpaged import ConfigError, Engine, ModelLoadError, SamplingParams
from jpaged.models.dense import dense_logits, dense_logprobs
from jpaged.models.own_model import open_own_model
from jpaged.sharding import AxisTable

from ... import quick_compile

pytestmark = pytest.mark.usefixtures("few_buckets")
ROOT = Path(__file__).parents[3]
SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_blocks": 65,
    "warmup": "off",
}
PROMPTS = [[index + 1] * (10 + 3 * index) for index in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        yield importlib.import_module("own_model")
    finally:
        sys.path.remove(str(ROOT / "examples"))


@pytest.fixture
def model(example):
    return example.Tiny(nnx.Rngs(0))


@nnx.jit
def likeliest(model, ids, last):
    return jnp.argmax(dense_logits(model, ids)[:, last], axis=-1)


jitted_logprobs = nnx.jit(dense_logprobs)


def dense_tokens(model, prompt, count=12):
    """Return the likeliest continuation by the dense forward, of one padded length."""
    ids = np.zeros((1, 40), np.int32)
    ids[0, : len(prompt)] = prompt
    for last in range(len(prompt) - 1, len(prompt) + count - 1):
        ids[0, last + 1] = likeliest(model, jnp.asarray(ids), last)[0]
    return tuple(ids[0, len(prompt) : len(prompt) + count].tolist())


@pytest.fixture(scope="module")
def wanted(example):
    model = example.Tiny(nnx.Rngs(0))
    return [dense_tokens(model, prompt) for prompt in PROMPTS]


def drawn(engine):
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]


@pytest.mark.slow
def test_scalars_and_plain_arrays_of_a_module_are_weights_too(example):
    class Scaled(example.Tiny):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.scale, self.offsets = nnx.Param(jnp.float32(2.0)), jnp.ones(8)

        def logits(self, hidden):
            return super().logits(hidden) * self.scale[...] * self.offsets[0]

    model = Scaled(nnx.Rngs(0))
    with Engine(model, **SIZES) as engine:
        wanted = dense_logprobs(model, jnp.array([PROMPTS[3]]))[0]
        assert np.abs(engine.logprobs(PROMPTS[3]) - wanted).max() < 1e-4
        assert float(engine.params["scale"][...]) == 2.0


@pytest.mark.slow
def test_a_trainer_may_rematerialise_its_blocks(example):
    class Frugal(example.Tiny):
        def __call__(self, inputs, cache):
            x = self.tokens(inputs.token_ids) + self.positions(inputs.attention.positions)
            for block in self.blocks:
                x, cache = nnx.remat(type(block).__call__)(block, x, inputs, cache)
            return x, cache

    def gradients(model):
        loss = nnx.grad(lambda model: dense_logprobs(model, jnp.array([PROMPTS[0]])).sum())
        return nnx.to_pure_dict(loss(model))

    same = jax.tree.map(np.allclose, gradients(example.Tiny(nnx.Rngs(0))), gradients(Frugal(nnx.Rngs(0))))
    assert all(jax.tree.leaves(same))


@pytest.mark.slow
def test_it_draws_what_its_dense_forward_says(model, wanted):
    """In chunks, beside each other, and after preemptions; with its own arrays, or with others in their place."""
    _, state = nnx.split(model)
    abstract = nnx.eval_shape(lambda: type(model)(nnx.Rngs(0)))
    for module, params in ((model, None), (abstract, state), (abstract, nnx.to_pure_dict(state))):
        with Engine(module, params=params, **{**SIZES, "num_blocks": 9}) as engine:
            assert drawn(engine) == wanted
            assert engine.stats()["recompiles"] == 0
    assert engine.stats()["preemptions"] > 0


@pytest.mark.slow
def test_a_dense_forward_takes_sequences_padded_in_front(model):
    ids, mask = np.zeros((3, 20), np.int32), np.zeros((3, 20), bool)
    for row, prompt in enumerate(PROMPTS[:3]):
        ids[row, -len(prompt) :], mask[row, -len(prompt) :] = prompt, True
    padded = dense_logprobs(model, jnp.asarray(ids), mask_BN=mask)
    for row, prompt in zip(padded, PROMPTS, strict=False):
        np.testing.assert_allclose(row[1 - len(prompt) :], dense_logprobs(model, jnp.array([prompt]))[0], atol=1e-5)


def test_a_trainers_step_goes_into_the_engine_and_both_agree(model, wanted):
    graph, state = nnx.split(model)
    with Engine(model, num_decode_steps=1, **SIZES) as engine:
        assert drawn(engine) == wanted
        changed = jax.tree.map(lambda x: x * 1.25, state)
        engine.update_params(changed)
        trained = nnx.merge(graph, changed)
        assert drawn(engine) == [dense_tokens(trained, prompt) for prompt in PROMPTS]
        sampled = replace(GREEDY, temperature=1.0, seed=3, n=2)
        for temperature in (1.0, 0.7):
            ids = np.array(PROMPTS[0] * 2)
            theirs = jitted_logprobs(trained, jnp.array([ids]), temperature)[0]
            assert np.abs(engine.logprobs(ids, temperature=temperature) - theirs).max() < 1e-4
        assert engine.compare_logprobs(lambda ids: jitted_logprobs(trained, ids), PROMPTS, sampled).max < 1e-4
        partial = {name: leaf for name, leaf in nnx.to_pure_dict(changed).items() if name != "tokens"}
        with pytest.raises(
            ModelLoadError,
            match=r"^params, a tree under the paths of the model's own weights: missing: tokens\.embedding; ",
        ):
            engine.update_params({**partial, "x": jnp.ones(1)})


def broken(model, **changes):
    """Return the module with other attributes."""
    for name, value in changes.items():
        setattr(model, name, value)
    return model


def test_a_module_that_cannot_be_served_is_refused(model, example):
    spec = model.spec
    cases = {
        "is a NoneType, wanted a jpaged.ModelSpec": {"spec": None},
        "a step of it cannot be traced: ValueError: attend: got queries": {
            "spec": replace(spec, layers=tuple(replace(layer, head_size=32) for layer in spec.layers))
        },
        r"its hidden states are .*shape=\(8, 64\), dtype=float32\), its spec wants the shape \(8, 128\)": {
            "spec": replace(spec, hidden_size=128)
        },
        r"its logits are .*shape=\(8, 97\), dtype=float32\), its spec wants the shape \(8, 101\)": {
            "spec": replace(spec, vocab_size=101)
        },
        "layers is .*, wanted a tuple of AttentionLayer": {"spec": replace(spec, layers=())},
        "eos_token_ids is 5, wanted a tuple": {"spec": replace(spec, eos_token_ids=5)},
        r"eos_token_ids is \(500,\)": {"spec": replace(spec, eos_token_ids=(500,))},
        "dtype is 'int32', wanted one of": {"spec": replace(spec, dtype="int32")},
        "max_context_len is 0, wanted": {"spec": replace(spec, max_context_len=0)},
        "the model returns no cache with new keys": {"blocks": nnx.List([])},
        "counter is a parameter of int32, wanted floats": {"counter": nnx.Param(jnp.zeros((), jnp.int32))},
    }
    for words, changes in cases.items():
        with pytest.raises(ModelLoadError, match=words):
            Engine(broken(example.Tiny(nnx.Rngs(0)), **changes), **SIZES)
    with pytest.raises(ModelLoadError, match=r"missing: .*tokens\.embedding"):
        Engine(nnx.eval_shape(lambda: example.Tiny(nnx.Rngs(0))), **SIZES)
    options = {"load_format": "dummy", "revision": "main", "dtype": "bfloat16", "hf_overrides": {"x": 1}}
    for name, value in options.items():
        with pytest.raises(ConfigError, match=rf"^{name}: got .*, allowed: nothing beside a model of your own"):
            Engine(model, **{name: value}, **SIZES)


OVER_TWO_DEVICES = """
import sys
from dataclasses import replace
import jax.numpy as jnp, numpy as np
from flax import nnx
sys.path.insert(0, "examples")
import own_model
from jpaged import Engine, ModelLoadError
from jpaged.models.dense import dense_logprobs
own_model.VOCAB = 96  # One that two devices share out.
AXES = {"up.kernel": ("embed", "mlp"), "up.bias": ("mlp",), "down.kernel": ("mlp", "embed")}

class Spread(own_model.Tiny):
    spec = replace(own_model.Tiny.spec, vocab_size=96)

    def __init__(self, axes):
        super().__init__(nnx.Rngs(0))
        for block in self.blocks:
            for path, names in axes.items():
                part, name = path.split(".")
                layer = getattr(block, part)
                setattr(layer, name, nnx.Param(getattr(layer, name)[...], logical_axes=names))

options = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "warmup": "off", "tensor_parallel_size": 2}
model, ids = Spread(AXES), list(range(1, 40))
with Engine(model, **options) as engine:
    kernel = engine.params["blocks"][0]["up"]["kernel"][...]
    assert kernel.addressable_shards[0].data.shape == (64, 128), kernel.sharding
    for _ in range(2):
        assert np.abs(engine.logprobs(ids) - dense_logprobs(model, jnp.array([ids]))[0]).max() < 1e-4
        engine.update_params(nnx.state(model, nnx.Param))
try:
    Engine(Spread({"up.kernel": ("embed", "fsdp")}), **options)
except ModelLoadError as error:
    print(error)
"""


@pytest.mark.slow
def test_weights_are_spread_over_devices_by_the_axes_that_variables_name():
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**quick_compile.environment(flags), "NPROC": "4"}
    command = [sys.executable, "-c", OVER_TWO_DEVICES]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    words = "model: Spread.blocks.0.up.kernel has the logical axis 'fsdp', wanted vocab, heads, kv_heads, mlp, "
    assert result.stdout.startswith(words)


def test_a_weight_that_the_devices_do_not_divide_is_refused(example):
    module = example.Tiny(nnx.Rngs(0))
    module.blocks[0].up.kernel.set_metadata(logical_axes=("embed", "mlp"))
    served, _ = open_own_model(module, axes=AxisTable.of(None, None))
    words = "up.kernel has 256 places along 'mlp', wanted a multiple of the 3 devices: nothing is padded"
    with pytest.raises(ModelLoadError, match=words):
        served.weights(AbstractMesh((1, 3), ("data", "tensor")))


IN_A_PROCESS = """
import json, os, jax, sys
from flax import nnx
sys.path.insert(0, "examples")
names = sorted(name for name in jax.config.values)
before = {name: str(jax.config.values[name]) for name in names}
from own_model import Tiny
from jpaged import Engine, SamplingParams
options = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_logprobs": 0, "warmup": "off"}
for engine in (
    Engine(Tiny(nnx.Rngs(0)), **options),
    Engine("tests/golden/families/llama", load_format="dummy", compilation_cache_dir="off", **options),
):
    engine.generate([1, 2], SamplingParams(max_tokens=2, detokenize=False))
after = {name: str(jax.config.values[name]) for name in names}
print(json.dumps([name for name in names if before[name] != after[name]]))
"""


@pytest.mark.slow
def test_jaxs_configuration_is_left_alone(tmp_path):
    """By an engine for a model of the caller's own, and by any other with the compilation cache off."""
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-c", IN_A_PROCESS]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads(result.stdout) == []
    assert not list(tmp_path.rglob("xla"))
