"""A caller's own module is compared with its spec at start, in all kinds of steps, and may be written as others are."""

import functools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jpaged import AttentionLayer, ConfigError, Engine, ModelLoadError, ModelSpec, SamplingParams
from jpaged.models.dense import dense_logprobs
from jpaged.models.inputs import ModelInputs, call_fault

from ... import quick_compile
from .every_rule import tokens_by_every_rule

pytestmark = pytest.mark.usefixtures("few_buckets")
ROOT = Path(__file__).parents[3]
SIZES: dict[str, Any] = {
    "max_num_seqs": 8, "max_num_batched_tokens": 16, "block_size": 8, "num_blocks": 33, "warmup": "off",
    "num_decode_steps": 1,
}  # fmt: skip
LAYER = AttentionLayer(num_heads=2, num_kv_heads=1, head_size=8)
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=5, ignore_eos=True, detokenize=False, logprobs=0)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.qkv = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(16, 16, use_bias=False, rngs=rngs)

    def __call__(self, x, inputs, cache, layer, **options):
        q, k, v = jnp.split(self.qkv(x).reshape(x.shape[0], 4, 8), [2, 3], axis=1)
        attended, cache = cache.attend(layer, q, k, v, inputs.attention, scale=0.5, **options)
        return x + self.out(attended.reshape(x.shape)), cache


class Small(nnx.Module):
    """Two layers of attention; what `calls` lists of layers and options, each block's `attend` is given."""

    def __init__(self, *, layers=(LAYER, LAYER), calls=((0, {}), (1, {}))):
        rngs = nnx.Rngs(0)
        self.tokens = nnx.Embed(23, 16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in calls])
        self.spec = ModelSpec(vocab_size=23, hidden_size=16, dtype="float32", max_context_len=64, layers=tuple(layers))
        self.calls = nnx.static(calls)

    def __call__(self, inputs, cache):
        x = self.tokens(inputs.token_ids)
        for block, (layer, options) in zip(self.blocks, self.calls_of(inputs), strict=True):
            x, cache = self.block(block, x, inputs, cache, layer, options)
        return x, cache

    def calls_of(self, inputs):
        return self.calls

    def block(self, block, x, inputs, cache, layer, options):
        return block(x, inputs, cache, layer, **options)

    def logits(self, hidden):
        return self.tokens.attend(hidden)


jitted_logprobs = nnx.jit(dense_logprobs)


def both_logprobs(module):
    """Return the logprobs of the tokens that an engine has drawn, by the engine and by the dense forward."""
    with Engine(module, **SIZES) as engine:
        sample = engine.generate(IDS, PARAMS)[0].outputs[0]
        assert engine.stats()["recompiles"] == 0
    ids = [*IDS, *sample.token_ids]
    ours = [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
    return np.array(ours), np.asarray(jitted_logprobs(module, jnp.array([ids]))[0, len(IDS) - 1 :])


WINDOWED, CAPPED = replace(LAYER, window=8), replace(LAYER, soft_cap=2.0)
WITH_SINKS = replace(LAYER, has_sinks=True)
SHARING = replace(LAYER, pages_of=0)
MISFITS: dict[str, tuple[str, dict[str, Any]]] = {
    "no window": ("attend: got window None in layer 1, its spec wants 8: pass window=8", {"layers": (LAYER, WINDOWED)}),
    "another window": (
        "attend: got window 9 in layer 0, its spec wants 8",
        {"layers": (WINDOWED, LAYER), "calls": ((0, {"window": 9}), (1, {}))},
    ),
    "a window of its own": (
        "attend: got window 9 in layer 1, its spec wants None",
        {"calls": ((0, {}), (1, {"window": 9}))},
    ),
    "no soft cap": ("attend: got soft_cap None in layer 0, its spec wants 2.0", {"layers": (CAPPED, CAPPED)}),
    "no sinks": ("attend: got no sinks in layer 0, its spec has has_sinks=True: pass", {"layers": (WITH_SINKS,) * 2}),
    "sinks of its own": (
        "attend: got sinks in layer 1, its spec has has_sinks=False: pass none",
        {"calls": ((0, {}), (1, {"sinks": (0.5, -1.0)}))},
    ),
    "layer 0 twice": ("attend: got layer 0 a second time, wanted layer 1: each layer once", {"calls": ((0, {}),) * 2}),
    "one call too many": ("attend: got layer 1 a second time, wanted no more", {"calls": ((0, {}), (1, {}), (1, {}))}),
    "one call too few": ("new keys and values of 2 layers, wanted those of the spec's 3", {"layers": (LAYER,) * 3}),
    "another order": ("attend: got layer 1 in a cache that has no keys .* of layer 0", {"calls": ((1, {}), (0, {}))}),
    "a layer outside": ("attend: got layer 2, wanted one of the spec's 2", {"calls": ((0, {}), (2, {}))}),
    "a negative layer": ("attend: got layer -1, wanted one of the spec's 2", {"calls": ((0, {}), (-1, {}))}),
    "more query heads": (
        r"attend: got queries \[8, 2, 8\] in layer 0, its spec wants \[8, 4, 8\]",
        {"layers": (replace(LAYER, num_heads=4),) * 2},
    ),
    "keys of its own": ("got keys or values of its own in layer 1, .* of layer 0", {"layers": (LAYER, SHARING)}),
}  # fmt: skip


@pytest.mark.parametrize(("words", "options"), MISFITS.values(), ids=MISFITS)
def test_a_module_that_does_not_attend_as_its_spec_says_is_refused_at_start(words, options):
    """By the dense forward too, with the same words."""
    module = Small(**options)
    with pytest.raises(ModelLoadError, match=f"^model: a step of it cannot be traced: ValueError: .*{words}"):
        Engine(module, **SIZES)
    with pytest.raises(ValueError, match=words.replace(r"\[8, ", r"\[4, ")):
        dense_logprobs(module, jnp.array([IDS[:4]]))


HEADS = {
    r"queries \[4, 2, 8\] in layer 0, its spec wants \[4, 4, 8\]": {"num_heads": 4},
    r"keys \[4, 1, 8\] in layer 0, its spec wants \[4, 2, 8\]": {"num_kv_heads": 2},
    r"queries \[4, 2, 8\] in layer 0, its spec wants \[4, 2, 16\]": {"head_size": 16},
}


@pytest.mark.parametrize(("words", "fields"), HEADS.items(), ids=map(str, HEADS.values()))
def test_heads_that_differ_from_the_spec_are_named_with_their_layer(words, fields):
    with pytest.raises(ValueError, match=f"^attend: got {words}"):
        dense_logprobs(Small(layers=(replace(LAYER, **fields),) * 2), jnp.array([IDS[:4]]))


@pytest.mark.parametrize("transform", [lambda run: run, nnx.remat, nnx.jit], ids=["plain", "remat", "jit"])
def test_a_layer_that_attends_twice_from_one_cache_is_refused(transform):
    """The keys and values of the two calls would lie in the same slots."""

    class Twice(Small):
        def __call__(self, inputs, cache):
            run = transform(lambda block, x, inputs, cache: block(x, inputs, cache, 0))
            x, _ = run(self.blocks[0], self.tokens(inputs.token_ids), inputs, cache)
            y, cache = run(self.blocks[0], 1 - 2 * x, inputs, cache)
            return self.blocks[1](x + y, inputs, cache, 1)

    with pytest.raises(ModelLoadError, match=r"calls attend 3 times in a step, its spec wants 2, each layer once"):
        Engine(Twice(), **SIZES)


@pytest.mark.slow
def test_a_layer_without_keys_is_refused_where_its_spec_shares_none():
    class Keyless(Small):
        def block(self, block, x, inputs, cache, layer, options):
            if block is self.blocks[0]:
                return block(x, inputs, cache, layer)
            _, cache = cache.attend(layer, x.reshape(-1, 2, 8), None, None, inputs.attention, scale=1.0)
            return x, cache

    with pytest.raises(ModelLoadError, match=r"attend: got no keys in layer 1, its spec wants \[1, 1, 8\]"):
        Engine(Keyless(), **SIZES)
    calls = ((0, {}), (0, {}))  # The layer whose keys it reads may be named instead of its own.
    drawn = []
    for options in ({}, {"calls": calls}):
        with Engine(Keyless(layers=(LAYER, SHARING), **options), **SIZES) as engine:
            drawn.append(engine.generate(IDS, PARAMS)[0].outputs[0].token_ids)
    assert drawn[0] == drawn[1]


def test_a_layer_number_may_be_traced():
    class Traced(Small):
        def block(self, block, x, inputs, cache, layer, options):
            return jax.jit(block.__call__)(x, inputs, cache, layer)

    ours, theirs = both_logprobs(Traced())
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def in_decodes(inputs):
    return inputs.attention.decodes_only


def in_prompts(inputs):
    return not inputs.attention.decodes_only


def with_16_tokens(inputs):
    return len(inputs.token_ids) == 16


def with_8_decodes(inputs):
    return inputs.attention.decodes_only and len(inputs.token_ids) == 8


@pytest.mark.parametrize("is_odd", [in_decodes, in_prompts, with_16_tokens, with_8_decodes])
def test_all_kinds_and_sizes_of_steps_are_compared_with_the_spec(is_odd):
    class Odd(Small):
        def calls_of(self, inputs):
            return ((0, {}), (1, {})) if is_odd(inputs) else self.calls

    with pytest.raises(ModelLoadError, match="attend: got window None in layer 1, its spec wants 8"):
        Engine(Odd(layers=(LAYER, WINDOWED), calls=((0, {}), (1, {"window": 8}))), **SIZES)


OLD_SIGNATURE = (
    r"^model: Old\.__call__ takes \(token_ids, cache, step\), wanted \(inputs, cache\): "
    r"inputs\.token_ids and inputs\.attention are what token_ids and step were$"
)


class Old(Small):
    """A module as they were written before `ModelInputs`."""

    def __call__(self, token_ids, cache, step):
        return super().__call__(ModelInputs(token_ids, step), cache)


def test_a_module_of_the_old_signature_is_refused_at_start():
    with pytest.raises(ModelLoadError, match=OLD_SIGNATURE):
        Engine(Old(), **SIZES)


def test_an_old_signature_that_binds_two_arguments_is_a_fault():
    module = type("Old", (Small,), {"__call__": lambda self, token_ids, cache, step=None: None})()
    assert "takes (token_ids, cache, step=None), wanted (inputs, cache)" in call_fault(module)


def test_an_old_call_by_other_names_is_told_what_it_gets_when_it_fails():
    """Its third argument has a default, as an option may have, so the signature fits a call with two."""
    module = type("Old", (Small,), {"__call__": lambda self, ids, kv, meta=None: (self.tokens(ids), kv)})()
    with pytest.raises(
        ModelLoadError, match=r"'ModelInputs'.*; its __call__ gets \(inputs, cache\): inputs\.token_ids"
    ):
        Engine(module, **SIZES)


def test_the_dense_forward_refuses_the_old_signature_in_the_same_words():
    with pytest.raises(ValueError, match=OLD_SIGNATURE):
        dense_logprobs(Old(), jnp.array([IDS[:4]]))


CALLS = {
    "plain": lambda self, inputs, cache: None,
    "other names": lambda self, x, kv: None,
    "an option": lambda self, inputs, cache, deterministic=True: None,
    "any": lambda self, *args, **kwargs: None,
    "jitted": jax.jit(lambda self, inputs, cache: None),
    "jitted by nnx": nnx.jit(lambda self, inputs, cache: None),
    "rematerialised": nnx.remat(lambda self, inputs, cache: None),
    "partial": functools.partialmethod(lambda self, option, inputs, cache: None, 1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_that_takes_inputs_and_cache_is_no_fault(call):
    module = type("Other", (Small,), {"__call__": call})()
    assert call_fault(module) is None


def test_a_module_that_passes_on_an_older_cache_is_refused():
    class Forgetful(Small):
        def __call__(self, inputs, cache):
            x, _ = self.blocks[0](self.tokens(inputs.token_ids), inputs, cache, 0)
            return self.blocks[1](x, inputs, cache, 1)

    with pytest.raises(ModelLoadError, match="layer 1 in a cache that has no keys and values of layer 0"):
        Engine(Forgetful(), **SIZES)


SPEC_FAULTS = {
    r"layers\[0\]\.window is 0, wanted an integer": {"window": 0},
    r"layers\[0\]\.window is 2\.5, wanted an integer": {"window": 2.5},
    r"layers\[0\]\.soft_cap is -1\.0, wanted a number above 0": {"soft_cap": -1.0},
    r"layers\[0\]\.has_sinks is 1, wanted True or False": {"has_sinks": 1},
    r"layers\[0\]\.pages_of is 0, wanted the index of an earlier layer": {"pages_of": 0},
    r"layers\[0\]\.pages_of is 7, wanted the index of an earlier layer": {"pages_of": 7},
}


@pytest.mark.parametrize(("words", "fields"), SPEC_FAULTS.items(), ids=map(str, SPEC_FAULTS.values()))
def test_a_spec_that_says_what_no_layer_can_do_is_refused(words, fields):
    with pytest.raises(ModelLoadError, match=rf"^model: Small\.spec: {words}"):
        Engine(Small(layers=(replace(LAYER, **fields), LAYER)), **SIZES)


class InNnx(Small):
    """Transforms of nnx inside, a jitted head in bfloat16, and hidden states in bfloat16."""

    def __call__(self, inputs, cache):
        x, cache = super().__call__(inputs, cache)
        return x.astype(jnp.bfloat16), cache

    def block(self, block, x, inputs, cache, layer, options):
        transform = nnx.remat if layer else nnx.jit
        return transform(lambda block, x, inputs, cache: block(x, inputs, cache, layer))(block, x, inputs, cache)

    @nnx.jit
    def logits(self, hidden):
        return super().logits(hidden.astype(jnp.float32)).astype(jnp.bfloat16)


class InJax(Small):
    """Transforms of JAX inside, a head in float16, hidden states in two dtypes, and an array of numpy, so float64.

    One layer has a window, the other a soft cap and sinks.
    """

    def __init__(self):
        calls = (0, {"window": np.int64(8)}), (1, {"soft_cap": 2})
        super().__init__(layers=(WINDOWED, replace(CAPPED, has_sinks=True)), calls=calls)
        self.sinks = nnx.Param(jnp.array([0.5, 3.0]))
        self.scales = nnx.Variable(np.linspace(0.5, 1.5, 23)[None])

    def __call__(self, inputs, cache):
        x, cache = super().__call__(inputs, cache)
        return x.astype(jnp.float16 if len(inputs.token_ids) > 8 else jnp.float32), cache

    def block(self, block, x, inputs, cache, layer, options):
        x, _ = jax.lax.scan(lambda x, weight: (x + weight * block.out.kernel[:1], None), x, jnp.ones((3, 1, 1)))
        options = options | {"sinks": self.sinks[...]} if layer else options
        run = jax.jit if layer else jax.checkpoint
        return run(lambda block, x, inputs, cache: block(x, inputs, cache, layer, **options))(block, x, inputs, cache)

    def logits(self, hidden):
        scales = self.scales[...].astype(jnp.float32)
        return (super().logits(hidden.astype(jnp.float32)) * scales).astype(jnp.float16)


@pytest.mark.parametrize("kind", [pytest.param(InNnx, marks=pytest.mark.slow), InJax])
def test_an_ordinary_module_draws_and_scores_what_its_dense_forward_says(kind):
    ours, theirs = both_logprobs(kind())
    assert np.abs(ours - theirs).max() < 8e-3, "both round logits, which are about 1, to 16 bits: by 2 ** −8"


def test_a_window_may_be_an_integer_of_numpy():
    module = Small(layers=(replace(LAYER, window=np.int64(8)), LAYER), calls=((0, {"window": 8}), (1, {})))
    with Engine(module, **SIZES) as engine:
        assert engine.attention.startswith("native"), "the check of the backend writes the window as JSON"


def test_a_module_that_cannot_be_traced_in_a_program_is_refused_at_start_with_the_cause():
    class Branches(Small):
        def logits(self, hidden):
            return super().logits(hidden) if hidden.shape[0] != 8 else super().logits(hidden)[: int(hidden[0, 0])]

    class Counts(Small):
        def logits(self, hidden):
            return jnp.argsort(super().logits(hidden))

    class Keeps(Small):
        def __call__(self, inputs, cache):
            if inputs.attention.decodes_only:
                self.tokens.embedding[...] *= 1.5 if bool(inputs.token_ids[0] > 3) else 1.0
            return super().__call__(inputs, cache)

    for module, words in (
        (Branches(), r"model: its `logits` cannot be traced: ConcretizationTypeError"),
        (Counts(), r"model: its logits are .*int32\), wanted floats"),
        (Keeps(), r"model: a step of it cannot be traced: TracerBoolConversionError"),
    ):
        with pytest.raises(ModelLoadError, match=words):
            Engine(module, **SIZES)


def test_the_weights_of_a_module_are_found_in_a_training_state():
    module, other = Small(), Small()
    state = nnx.to_pure_dict(nnx.split(module)[1])
    doubled = jax.tree.map(lambda leaf: 2 * leaf, state)
    with Engine(other, params={"params": doubled, "ema_params": state}, **SIZES) as engine:
        before = np.asarray(engine.logprobs(IDS))
        engine.update_params({"step": 3, "params": state, "opt_state": [{"mu": doubled, "nu": doubled}]})
        wanted = np.asarray(jitted_logprobs(module, jnp.array([IDS]))[0])
        assert np.abs(engine.logprobs(IDS) - wanted).max() < 1e-4 < np.abs(before - wanted).max()


@pytest.mark.slow
def test_with_x64_an_engine_draws_the_same_tokens_by_every_rule(tiny):
    environment = {**quick_compile.environment(), "JAX_ENABLE_X64": "1"}
    command = [sys.executable, "-m", "tests.jpaged.research.every_rule", tiny]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads(result.stdout) == json.loads(json.dumps(tokens_by_every_rule(tiny)))


def test_what_a_trainer_sets_to_debug_its_own_code_changes_nothing():
    """Not at the start of an engine either; a mesh of the trainer's own is none of the engine's."""
    module, params = Small(), replace(PARAMS, allowed_token_ids=[3, 4, 5])
    with (
        jax.disable_jit(),
        jax.debug_nans(True),
        jax.debug_infs(True),
        jax.set_mesh(jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Explicit,))),
    ):
        engine = Engine(module, **SIZES)
        inside = engine.generate(IDS, params)[0].outputs[0].token_ids
        engine.sleep(2)
        engine.update_params(nnx.state(module))
        engine.wake_up()
        scores = np.asarray(engine.logprobs(IDS))
    with engine:
        assert engine.generate(IDS, params)[0].outputs[0].token_ids == inside
        assert np.abs(scores - jitted_logprobs(module, jnp.array([IDS]))[0]).max() < 1e-4
        assert engine.stats()["recompiles"] == 0


def test_a_module_of_float64_is_served_in_float32():
    module = Small()
    nnx.update(module, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.state(module)))
    with Engine(module, **SIZES) as engine:
        for factor in (1, 2):
            state = jax.tree.map(lambda leaf, factor=factor: np.float64(factor) * leaf, nnx.state(module))
            engine.update_params(state)
            narrow = nnx.merge(nnx.graphdef(module), jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), state))
            wanted = jitted_logprobs(narrow, jnp.array([IDS]))[0]
            assert np.abs(engine.logprobs(IDS) - wanted).max() < 1e-4


ADAPTER = "; put a model of another library, or a function, behind an adapter, as examples/linen_model.py has one"
TREE = "; give arrays as params, beside the directory that has the model's config"
NO_MODULES = {
    "linen": (lambda: linen.Dense(3), ADAPTER),
    "a function": (lambda: jnp.sin, ADAPTER),
    "a callable pytree": (lambda: jax.tree_util.Partial(jnp.sin), ADAPTER),
    "a class": (lambda: nnx.Linear, "; give an instance of the class"),
    "a dict": (lambda: {"a": jnp.ones(3)}, TREE),
    "a state": (lambda: nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), TREE),
    "a number": (lambda: 3, ""),
    "an empty text": (lambda: "", ""),
}


@pytest.mark.parametrize(("make", "way_out"), NO_MODULES.values(), ids=NO_MODULES)
def test_what_is_neither_a_path_nor_a_module_of_nnx_is_refused_with_the_way_to_serve_it(make, way_out):
    message = f"^model: got .*a built-in name; for an Engine also a module of nnx{way_out}$"
    with pytest.raises(ConfigError, match=message):
        Engine(make())
