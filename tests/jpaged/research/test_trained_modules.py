"""A module is served as it is trained: dropout, running statistics, scans over layers, methods of other names, Linen.

The oracle of each is its own dense forward in evaluation mode, before and after updates from a whole training state.
"""

import re
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from jpaged import AttentionLayer, ConfigError, Engine, ModelLoadError, ModelSpec, SamplingParams, draw
from jpaged.models.dense import DenseAttention, dense_logits, dense_logprobs
from jpaged.models.inputs import unpaged_inputs
from jpaged.models.served import ServedModule

pytestmark = pytest.mark.usefixtures("few_buckets")
EXAMPLES = Path(__file__).parents[3] / "examples"
VOCAB = 23
LAYER = AttentionLayer(num_heads=2, num_kv_heads=1, head_size=8)
SIZES: dict[str, Any] = {
    "max_num_seqs": 8, "max_num_batched_tokens": 16, "block_size": 8, "num_blocks": 17, "num_decode_steps": 4,
    "warmup": "off",
}  # fmt: skip
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [5, 3, 5, 8, 9, 7, 9], [2]]
NUM_TOKENS = 16
PARAMS = SamplingParams(
    temperature=0.8, n=4, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, logprobs=0
)
MAX_DIFFERENCE = 1e-5
"""Of logprobs in float32, of logits below 4. The largest one that was measured is 3e-6."""
MAX_STEPS = 1.25
"""The same in bfloat16, in steps of the largest logit at the same place: 0.016 for one between 2 and 4, 0.25 between 32
and 64. The largest one that was measured is 0.9 steps, of logits up to 219."""


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype: str):
        options = {"use_bias": False, "dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.qkv, self.out = nnx.Linear(16, 32, **options), nnx.Linear(16, 16, **options)

    def __call__(self, x, inputs, cache, layer):
        q, k, v = jnp.split(self.qkv(x).reshape(x.shape[0], 4, 8), [2, 3], axis=1)
        attended, cache = cache.attend(layer, q, k, v, inputs.attention, scale=0.5)
        return x + self.out(attended.reshape(x.shape)), cache


class Plain(nnx.Module):
    """Two layers of attention."""

    spec = ModelSpec(vocab_size=VOCAB, hidden_size=16, dtype="float32", max_context_len=64, layers=(LAYER,) * 2)

    def __init__(self, dtype="float32"):
        rngs = nnx.Rngs(0, dropout=1)
        self.spec = replace(self.spec, dtype=dtype)
        self.tokens = nnx.Embed(VOCAB, 16, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, dtype) for _ in self.spec.layers])
        self.between = nnx.List([self.regularizer(rngs, dtype) for _ in self.spec.layers])

    def regularizer(self, rngs, dtype):
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

    def regularizer(self, rngs, dtype):
        return nnx.Dropout(0.5, rngs=rngs)


class Normed(Plain):
    """Batch norm has running statistics, which are no parameters."""

    def regularizer(self, rngs, dtype):
        return nnx.BatchNorm(16, dtype=dtype, param_dtype=dtype, rngs=rngs)


class Loud(Normed):
    """Its logits are as large as those of trained models."""

    def logits(self, hidden):
        return 16 * super().logits(hidden)


class Scanned(Plain):
    """One block whose parameters have an axis of layers, which `attend` is called with as a traced number."""

    def __init__(self, dtype="float32"):
        super().__init__(dtype)
        self.blocks = nnx.vmap(lambda key: Block(nnx.Rngs(key), dtype))(jax.random.split(jax.random.key(0), 2))

    def __call__(self, inputs, cache):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        def run(carry, block, layer):
            return block(carry[0], inputs, carry[1], layer)

        return run((self.tokens(inputs.token_ids), cache), self.blocks, jnp.arange(2))


class Named(Dropped):
    """A trainer's own forward keeps its name. A counter of integers and a cache of an earlier use are no weights."""

    def __init__(self, dtype="float32"):
        super().__init__(dtype)
        self.num_calls, self.old = nnx.Variable(jnp.int32(7)), nnx.Cache(jnp.zeros((4, 4)))

    def serve(self, inputs, cache):
        self.num_calls[...] += 1
        return Plain.__call__(self, inputs, cache)

    def head(self, hidden):
        return self.tokens.attend(hidden)

    def __call__(self, ids, mask):
        raise AssertionError("the trainer's")

    logits = None


def adapted(dtype):
    """Return a model of Linen behind the adapter of the example."""
    example, ids = import_module("linen_model"), jnp.arange(8)
    model = example.Model()
    init = jax.jit(lambda key: model.init(key, unpaged_inputs(ids, ids), DenseAttention(1))["params"])
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), init(jax.random.key(0)))
    return example.Linen(model, params, replace(example.SPEC, dtype=dtype))


@partial(jax.jit, static_argnums=0)
def logits_of(graph: nnx.GraphDef[Any], state: nnx.State, ids: jax.Array) -> jax.Array:
    """Return the logits [B, N, V] of a module's own dense forward."""
    module = nnx.merge(graph, state)
    return dense_logits(ServedModule(module, "serve", "head") if isinstance(module, Named) else module, ids)


def check(engine: Engine, module: nnx.Module) -> None:
    """Check that an engine draws the tokens of the module's dense forward, with its logprobs.

    Prompts are in chunks. In bfloat16 a draw may fall on a neighbour where it is near the edge of a token's share.
    """
    outputs = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    samples = [(prompt, one) for prompt, output in zip(PROMPTS, outputs, strict=True) for one in output.outputs]
    ids = np.zeros((len(samples), max(map(len, PROMPTS)) + NUM_TOKENS), np.int32)
    for row, (prompt, one) in zip(ids, samples, strict=True):
        row[: len(prompt) + NUM_TOKENS] = [*prompt, *one.token_ids]
    module.eval()
    logits = np.asarray(logits_of(*nnx.split(module), jnp.asarray(ids)), np.float32)
    module.train()
    # The logits before each drawn token, of all samples one after the other.
    rows = np.concatenate(
        [row[len(prompt) - 1 :][:NUM_TOKENS] for row, (prompt, _) in zip(logits, samples, strict=True)]
    )
    indices = np.repeat([one.index for _, one in samples], NUM_TOKENS), np.tile(np.arange(NUM_TOKENS), len(samples))
    drawn = np.concatenate([one.token_ids for _, one in samples])
    is_same = np.asarray(draw(jnp.asarray(rows), PARAMS.seed, *indices, PARAMS)) == drawn
    assert is_same.mean() >= (1.0 if module.spec.dtype == "float32" else 0.95)
    ours = [
        entry[token].logprob for _, one in samples for token, entry in zip(one.token_ids, one.logprobs, strict=True)
    ]
    theirs = rows[np.arange(len(rows)), drawn] - np.logaddexp.reduce(rows, axis=1)
    largest = np.abs(rows).max(axis=1)
    bfloat16_steps = 2.0 ** (np.floor(np.log2(largest)) - 7)
    allowed = MAX_DIFFERENCE if module.spec.dtype == "float32" else MAX_STEPS * bfloat16_steps
    assert (np.abs(np.asarray(ours) - theirs) <= allowed).all()
    assert {span.version for _, one in samples for span in one.weight_versions} == {engine.weights_version}


class Widest:
    """Notes the most tokens that one dispatch decodes of a sequence."""

    num_tokens = 0

    def dispatched(self, record: Any) -> None:
        self.num_tokens = max(self.num_tokens, *record.inputs.decode_lens, 1)

    def retired(self, record: Any) -> None:
        pass


def train(module: nnx.Module, seed: int, *kinds: Any) -> None:
    """Change every variable of these kinds, by default every parameter and running statistic, as training would."""
    rng = np.random.default_rng(seed)

    def changed(weight: jax.Array) -> jax.Array:
        factors, terms = np.exp(rng.normal(0, 0.05, weight.shape)), rng.normal(0, 0.01, weight.shape)
        return jnp.asarray(np.asarray(weight, np.float32) * factors + terms, weight.dtype)

    nnx.update(module, jax.tree.map(changed, nnx.state(module, nnx.Any(*kinds or (nnx.Param, nnx.BatchStat)))))


@pytest.fixture(scope="module")
def served():
    """Give a function that returns a module of a kind and an engine that serves it, with equal weights.

    Tests leave both with equal weights, so that they share the programs of an engine.
    """
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)

        @cache
        def start(kind, dtype):
            module = kind(dtype)
            names = {"call": "serve", "logits": "head"} if kind is Named else {}
            params = nnx.state(module, nnx.Param) if kind is Normed else None
            return module, stack.enter_context(Engine(module, **names, params=params, **SIZES))

        yield start


def training_state(module: nnx.Module, optimizer: nnx.Optimizer | None) -> Any:
    """Return all that a trainer has of a module: its state and the optimizer's, or for Linen a TrainState."""
    if isinstance(module, Plain):
        return nnx.state((module, optimizer))
    params = nnx.to_pure_dict(nnx.state(module))["params"]
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


CASES = [(Normed, "float32")]
SLOW = [
    pytest.param(kind, dtype, marks=pytest.mark.slow)
    for kind in (Named, Normed, Loud, Scanned, adapted)
    for dtype in ("float32", "bfloat16")
    if (kind, dtype) not in [*CASES, (Loud, "float32")]
]


@pytest.mark.parametrize(("kind", "dtype"), [*CASES, *SLOW], ids=lambda one: getattr(one, "__name__", one))
def test_a_module_draws_what_its_own_forward_says_during_updates_from_its_training_state(served, kind, dtype):
    """Four samples of each prompt, several tokens a dispatch, with preemptions."""
    module, engine = served(kind, dtype)
    optimizer = nnx.Optimizer(module, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    engine.core.observer = widest = Widest()
    for update in range(21):
        if update:
            train(module, update)
            engine.update_params(training_state(module, optimizer))
        if update in (0, 1, 10, 20):
            check(engine, module)
    assert engine.stats()["preemptions"] > 0
    assert engine.stats()["recompiles"] == 0
    assert widest.num_tokens == SIZES["num_decode_steps"]


def test_running_statistics_stay_where_a_tree_has_none(served):
    module, engine = served(Normed, "float32")
    train(module, 1, nnx.Param)
    engine.update_params(nnx.state(module, nnx.Param))
    check(engine, module)


def apart(module: nnx.Module) -> dict[str, Any]:
    """Return trees in which the running statistics stand beside the parameters, by name."""
    _, parameters, statistics, rest = nnx.split(module, nnx.Param, nnx.BatchStat, ...)
    del rest
    return {"tuple": (parameters, statistics), "mapping": {"params": parameters, "batch_stats": statistics}}


@pytest.mark.parametrize("name", ["tuple", "mapping"])
def test_running_statistics_may_stand_beside_the_parameters(served, name):
    module, engine = served(Normed, "float32")
    train(module, 2)
    engine.update_params(apart(module)[name])
    check(engine, module)
    with pytest.raises(ModelLoadError, match=r"betwen\.0\.mean has no place in the model, and between\.0\.mean is"):
        engine.update_params(
            {**nnx.to_pure_dict(nnx.state(module, nnx.Param)), "betwen": {"0": {"mean": jnp.ones(16)}}}
        )


def test_a_model_of_linen_scores_what_its_own_forward_says(monkeypatch):
    """Before and after an update from a training state."""
    monkeypatch.syspath_prepend(EXAMPLES)
    module = adapted("float32")
    jitted_logprobs = nnx.jit(dense_logprobs)

    def check_logprobs(engine: Engine) -> None:
        theirs = jitted_logprobs(module, jnp.array([PROMPTS[0]]))[0]
        np.testing.assert_allclose(engine.logprobs(PROMPTS[0]), theirs, atol=MAX_DIFFERENCE)

    with Engine(module, **SIZES) as engine:
        check_logprobs(engine)
        train(module, 1)
        engine.update_params(training_state(module, None))
        check_logprobs(engine)


def test_what_calls_have_left_and_values_that_are_no_arrays_are_no_weights():
    module = Plain()
    module.activations = nnx.Intermediate((jnp.ones(3),))
    module.empty, module.steps = nnx.Cache(None), nnx.Variable(0)
    with Engine(module, **SIZES) as engine:
        theirs = dense_logprobs(module, jnp.array([PROMPTS[0]]))[0]
        np.testing.assert_allclose(engine.logprobs(PROMPTS[0]), theirs, atol=1e-5)


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


class Pair(nnx.Module):
    """A layer with a window and one without, whose first one has the number `first`."""

    def __init__(self, key):
        self.blocks = nnx.List([Block(nnx.Rngs(key), "float32") for _ in range(2)])

    def __call__(self, x, inputs, cache, first):
        for number, (block, window) in enumerate(zip(self.blocks, (8, None), strict=True)):
            q, k, v = jnp.split(block.qkv(x).reshape(x.shape[0], 4, 8), [2, 3], axis=1)
            attended, cache = cache.attend(first + number, q, k, v, inputs.attention, scale=0.5, window=window)
            x = x + block.out(attended.reshape(x.shape))
        return x, cache


class Pattern(Plain):
    """Two pairs in a scan, which calls `attend` with traced numbers."""

    spec = replace(Plain.spec, layers=(replace(LAYER, window=8), LAYER) * 2)

    def __init__(self):
        super().__init__()
        self.blocks = nnx.vmap(Pair)(jax.random.split(jax.random.key(0), 2))

    def __call__(self, inputs, cache):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        def run(carry, pair, number):
            return pair(carry[0], inputs, carry[1], 2 * number)

        return run((self.tokens(inputs.token_ids), cache), self.blocks, jnp.arange(2))


class PatternByNumber(Pattern):
    """In its scan the numbers are integers of Python, so those of the first pair alone."""

    def __call__(self, inputs, cache):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(carry, pair):
            return pair(carry[0], inputs, carry[1], 0)

        return run((self.tokens(inputs.token_ids), cache), self.blocks)


class PatternInALoop(Pattern):
    """What the error says to write."""

    def __call__(self, inputs, cache):
        x = self.tokens(inputs.token_ids)
        for i in range(2):
            x, cache = jax.tree.map(lambda leaf: leaf[i], self.blocks)(x, inputs, cache, 2 * i)  # noqa: B023
        return x, cache


def test_a_scan_over_a_pattern_of_layers_is_refused_with_a_loop_in_its_place():
    loop = (
        "in place of the scan write: for i in range(N): "
        "x, cache = jax.tree.map(lambda leaf: leaf[i], blocks)(x, inputs, cache, i)"
    )
    for kind in (Pattern, PatternByNumber):
        with pytest.raises(ModelLoadError, match=re.escape(loop)) as caught:
            Engine(kind(), **SIZES)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_loop_in_place_of_a_scan_is_served():
    with Engine(PatternInALoop(), **SIZES) as engine:
        theirs = dense_logprobs(PatternInALoop(), jnp.array([PROMPTS[0]]))[0]
        np.testing.assert_allclose(engine.logprobs(PROMPTS[0]), theirs, atol=MAX_DIFFERENCE)


def test_a_scan_over_layers_that_differ_or_are_too_few_is_refused():
    class Windowed(Scanned):
        spec = replace(Plain.spec, layers=(LAYER, replace(LAYER, window=8)))

    with pytest.raises(ModelLoadError, match="got a traced number for the layer, wanted an integer of Python, since"):
        Engine(Windowed(), **SIZES)
    module = Scanned()
    module.spec = replace(Plain.spec, layers=(LAYER,) * 3)
    with pytest.raises(ModelLoadError, match="calls attend 2 times in a step, its spec wants 3"):
        Engine(module, **SIZES)
