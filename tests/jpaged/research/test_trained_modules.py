"""A module is served as it is trained: dropout, running statistics, a scan over its layers, methods of other names.

The oracle of each is its own dense forward in evaluation mode, before and after updates from a whole training state.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from jpaged import AttentionLayer, ConfigError, Engine, ModelLoadError, ModelSpec, SamplingParams
from jpaged.models.dense import dense_logprobs
from jpaged.models.served import ServedModule

VOCAB = 23
LAYER = AttentionLayer(num_heads=2, num_kv_heads=1, head_size=8)
SIZES: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 8, "num_blocks": 9, "warmup": "off",
}  # fmt: skip
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [5, 3, 5, 8, 9, 7, 9], [2]]
PARAMS = SamplingParams(temperature=0.8, n=2, seed=3, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=0)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(16, 16, use_bias=False, rngs=rngs)

    def __call__(self, x, inputs, cache, layer):
        q, k, v = jnp.split(self.qkv(x).reshape(x.shape[0], 4, 8), [2, 3], axis=1)
        attended, cache = cache.attend(layer, q, k, v, inputs.attention, scale=0.5)
        return x + self.out(attended.reshape(x.shape)), cache


class Plain(nnx.Module):
    """Three layers of attention."""

    spec = ModelSpec(vocab_size=VOCAB, hidden_size=16, dtype="float32", max_context_len=64, layers=(LAYER,) * 3)

    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.tokens = nnx.Embed(VOCAB, 16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in self.spec.layers])
        self.between = nnx.List([self.regularizer(rngs) for _ in self.spec.layers])

    def regularizer(self, rngs):
        return lambda x: x

    def __call__(self, inputs, cache):
        x = self.tokens(inputs.token_ids)
        for layer, (block, between) in enumerate(zip(self.blocks, self.between, strict=True)):
            x, cache = block(x, inputs, cache, layer)
            x = between(x)
        return x, cache

    def logits(self, hidden):
        return self.tokens.attend(hidden)


class Dropped(Plain):
    """It is in training mode, and draws from its own stream there."""

    def regularizer(self, rngs):
        return nnx.Dropout(0.5, rngs=rngs)


class Normed(Plain):
    """Batch norm has running statistics, which are no parameters."""

    def regularizer(self, rngs):
        return nnx.BatchNorm(16, rngs=rngs)


class Counted(Plain):
    """A counter of integers and a cache of an earlier use: neither is a weight."""

    def __init__(self):
        super().__init__()
        self.num_calls, self.old = nnx.Variable(jnp.int32(7)), nnx.Cache(jnp.zeros((4, 4)))

    def __call__(self, inputs, cache):
        self.num_calls[...] += 1
        return super().__call__(inputs, cache)


class Scanned(Plain):
    """One block whose parameters have an axis of layers, which `attend` is called with as a traced number."""

    def __init__(self):
        super().__init__()
        self.blocks = nnx.vmap(lambda key: Block(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))

    def __call__(self, inputs, cache):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        def run(carry, block, layer):
            return block(carry[0], inputs, carry[1], layer)

        return run((self.tokens(inputs.token_ids), cache), self.blocks, jnp.arange(3))


class Named(Dropped):
    """A trainer's own forward keeps its name."""

    def serve(self, inputs, cache):
        return Plain.__call__(self, inputs, cache)

    def head(self, hidden):
        return self.tokens.attend(hidden)

    def __call__(self, ids, mask):
        raise AssertionError("the trainer's")

    logits = None


def check(engine: Engine, module: Any, version: int = 0) -> None:
    """Check that an engine draws with the logprobs of the module's dense forward, with prompts in chunks."""
    for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, PARAMS, use_tqdm=False), strict=True):
        for sample in output.outputs:
            ids = jnp.array([[*prompt, *sample.token_ids]])
            ours = [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
            theirs = dense_logprobs(module, ids, 1.0)[0, len(prompt) - 1 :]
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
            assert {one.version for one in sample.weight_versions} == {version}


@pytest.mark.parametrize("kind", [Dropped, Normed, Counted, Scanned, Named], ids=lambda kind: kind.__name__)
def test_a_module_draws_what_its_own_forward_says_before_and_after_updates_from_its_training_state(kind):
    module, names = kind(), {"call": "serve", "logits": "head"} if kind is Named else {}
    served = ServedModule(module, *names.values())
    optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)

    def train(seed: int) -> None:
        """Change every parameter and running statistic, as steps in training mode would."""
        _, weights, _ = nnx.split(module, nnx.Any(nnx.Param, nnx.BatchStat), ...)
        noise = jax.random.normal(jax.random.key(seed), (64,))
        nnx.update(module, jax.tree.map(lambda weight: weight + 0.2 * jnp.abs(noise[weight.size % 64]), weights))

    with Engine(module, **names, **SIZES) as engine:
        module.eval()
        check(engine, served)
        assert engine.stats()["preemptions"] > 0
        module.train()
        for version in (1, 2):
            train(version)
            engine.update_params(nnx.state((module, optimizer)))
        module.eval()
        check(engine, served, version=2)
        assert engine.stats()["recompiles"] == 0


def test_running_statistics_stay_where_a_tree_has_none():
    module = Normed()
    with Engine(module, **SIZES) as engine:
        engine.update_params(nnx.state(module, nnx.Param))
        module.eval()
        check(engine, module, version=1)


def apart(module: nnx.Module) -> dict[str, Any]:
    """Return trees in which the running statistics stand beside the parameters, by name."""
    _, parameters, statistics, rest = nnx.split(module, nnx.Param, nnx.BatchStat, ...)
    del rest
    return {"tuple": (parameters, statistics), "mapping": {"params": parameters, "batch_stats": statistics}}


@pytest.mark.parametrize("name", ["tuple", "mapping"])
def test_running_statistics_may_stand_beside_the_parameters(name):
    module = Normed()
    with Engine(module, params=nnx.state(module, nnx.Param), **SIZES) as engine:
        for between in module.between:
            between.mean[...], between.var[...] = jnp.full(16, 0.3), jnp.full(16, 2.0)
        engine.update_params(apart(module)[name])
        module.eval()
        check(engine, module, version=1)
        with pytest.raises(ModelLoadError, match=r"betwen\.0\.mean has no place in the model, and between\.0\.mean is"):
            engine.update_params(
                {**nnx.to_pure_dict(nnx.state(module, nnx.Param)), "betwen": {"0": {"mean": jnp.ones(16)}}}
            )


def test_what_calls_have_left_and_values_that_are_no_arrays_are_no_weights():
    module = Plain()
    module.activations = nnx.Intermediate((jnp.ones(3),))
    module.empty, module.steps = nnx.Cache(None), nnx.Variable(0)
    with Engine(module, **SIZES) as engine:
        check(engine, module)


@pytest.fixture(scope="module")
def plain():
    module = Plain()
    with Engine(module, **SIZES) as engine:
        yield module, engine


def trees(module: nnx.Module) -> dict[str, Any]:
    """Return the module's weights as trainers hold them, by name."""
    pure = nnx.to_pure_dict(nnx.state(module))
    flat = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(module))}
    return {
        "a state beside its optimizer's": (
            nnx.state(module),
            nnx.state(nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.Param)),
        ),
        "Flax's TrainState": TrainState.create(apply_fn=None, params=pure, tx=optax.adam(1e-3)),
        "keys with slashes": {f"params/{name}": leaf for name, leaf in flat.items()},
        "float64 of numpy": {name: np.asarray(leaf, np.float64) for name, leaf in flat.items()},
        "more leaves": {
            "model": pure,
            "value_head": {"kernel": jnp.ones((16, 1))},
            "key": jax.random.key(0),
            "step": 3,
        },
    }


@pytest.mark.parametrize("name", trees(Plain()))
def test_a_whole_training_state_is_a_tree_of_weights(plain, name):
    module, engine = plain
    before = engine.logprobs(PROMPTS[0])
    engine.update_params(jax.tree.map(lambda leaf: leaf * 0, nnx.state(module)))
    assert not np.array_equal(engine.logprobs(PROMPTS[0]), before)
    engine.update_params(trees(module)[name])
    assert np.array_equal(engine.logprobs(PROMPTS[0]), before)


def test_names_without_the_modules_prefix_are_refused_with_the_prefix(plain):
    module, engine = plain
    tree = nnx.to_pure_dict(nnx.state(module))["blocks"]
    with pytest.raises(ModelLoadError, match=r"its names lack the prefix 'blocks\.' .* such as blocks\.0\.out\.kernel"):
        engine.update_params(tree)
    with pytest.raises(ModelLoadError, match="got int, wanted a flat or nested tree"):
        engine.update_params(3)


class Drawing(Dropped):
    """It asks for dropout in every mode."""

    def __call__(self, inputs, cache):
        x, cache = super().__call__(inputs, cache)
        return self.between[1](x, deterministic=False), cache


class Noting(Normed):
    """Its batch norm computes over the tokens of a step in every mode, in a jitted function."""

    def __call__(self, inputs, cache):
        x, cache = super().__call__(inputs, cache)
        return nnx.jit(lambda norm, x: norm(x, use_running_average=False))(self.between[1], x), cache


class Dropping(Plain):
    """Its jitted layer returns the cache that it was given, without what it has written."""

    spec = replace(Plain.spec, layers=(LAYER,))

    def __call__(self, inputs, cache):
        run = nnx.remat(lambda block, x, cache: (block(x, inputs, cache, 0)[0], cache))
        return run(self.blocks[0], self.tokens(inputs.token_ids), cache)


REFUSED = {
    "changes statistics": (Noting, {}, r"Noting changes its running statistics in evaluation mode too"),
    "drops the cache": (
        Dropping,
        {},
        r"its cache has new keys and values of 0 layers, wanted those of the spec's 1",
    ),
    "draws": (
        Drawing,
        {},
        r"Drawing draws random numbers in evaluation mode too .*its streams: between\.0\.rngs.*same each time",
    ),
    "no method": (Plain, {"call": "serve"}, r"Plain has no method 'serve', wanted the name of one for call"),
    "no name": (Plain, {"logits": 3}, r"Plain has no method 3, wanted the name of one for logits"),
}


@pytest.mark.parametrize(("kind", "names", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_serve_is_refused_by_name(kind, names, message):
    with pytest.raises(ModelLoadError, match=message):
        Engine(kind(), **names, **SIZES)


def test_methods_are_named_beside_a_module_alone():
    with pytest.raises(ConfigError, match="call, logits: got 'serve', 'logits', allowed: nothing without a module"):
        Engine("smollm2-135m", call="serve")


def test_a_scan_over_layers_that_differ_or_are_too_few_is_refused():
    class Windowed(Scanned):
        spec = replace(Plain.spec, layers=(LAYER, replace(LAYER, window=8), LAYER))

    with pytest.raises(ModelLoadError, match="got a traced number for the layer, wanted an integer of Python, since"):
        Engine(Windowed(), **SIZES)
    module = Scanned()
    module.spec = replace(Plain.spec, layers=(LAYER,) * 4)
    with pytest.raises(ModelLoadError, match="calls attend 3 times in a step, its spec wants 4"):
        Engine(module, **SIZES)
