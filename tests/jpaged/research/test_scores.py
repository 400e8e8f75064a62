"""`Engine.score` and `Engine.logprobs` in arrays, against a dense model in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import ContextLengthError, Engine, InvalidRequestError, SamplingParams

from ..tiny_model import CONFIG, SIZES, reference_logits, tensors

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
VOCAB = CONFIG["vocab_size"]
RNG = np.random.default_rng(3)
CONTEXTS = [RNG.integers(1, VOCAB, size).tolist() for size in (50, 7, 33, 1, 64, 40)]
CONTINUATIONS = [[RNG.integers(1, VOCAB, size).tolist() for size in (1, 5, 12, 1)] for _ in CONTEXTS]
PREEMPTED: dict[str, Any] = {"num_blocks": 25, "long_prefill_token_threshold": 24}


@pytest.fixture(scope="module")
def engine(tiny):
    with Engine(tiny, **SIZES, max_logprobs=100) as engine:
        yield engine


def log_softmax(token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """Return the logprobs [N, V] of all tokens after each position."""
    logits = reference_logits(token_ids) / temperature
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_top_logprobs_asked_ones_and_hidden_states_are_those_of_a_dense_model(engine: Engine) -> None:
    sequences = [CONTEXTS[1], CONTEXTS[2], [9], CONTEXTS[4]]
    longest = max(map(len, sequences))
    temperatures = [1.0, 0.5, 1.0, 2.0]
    exact = [log_softmax(ids, one)[:-1] for ids, one in zip(sequences, temperatures, strict=True)]
    asked = RNG.integers(0, VOCAB, (4, longest - 1, 3))
    given = engine.logprobs(sequences, temperature=temperatures, token_ids=asked)
    own = engine.logprobs(sequences, temperature=jnp.asarray(temperatures))
    hidden = engine.logprobs(sequences, hidden=True)
    assert hidden.shape == (4, longest, CONFIG["hidden_size"])
    head = tensors(0)["lm_head.weight"]
    for row, ids in enumerate(sequences):
        places = np.arange(len(ids) - 1)
        np.testing.assert_allclose(own[row, : len(ids) - 1], exact[row][places, ids[1:]], atol=1e-4)
        np.testing.assert_allclose(
            given[row, : len(ids) - 1], exact[row][places[:, None], asked[row, : len(ids) - 1]], atol=1e-4
        )
        np.testing.assert_allclose(hidden[row, : len(ids)] @ head.T, reference_logits(ids), atol=1e-3)
        assert not own[row, len(ids) - 1 :].any()
        assert not hidden[row, len(ids) :].any()
    for num_tops in (1, 100):
        token_ids, logprobs, log_rest = engine.logprobs(sequences, temperature=temperatures, top_k=num_tops)
        assert token_ids.shape == (4, longest - 1, num_tops)
        for row, one in enumerate(exact):
            order = np.asarray(token_ids[row, : len(one)])  # Tokens that almost tie may change places.
            found = np.take_along_axis(one, order, 1)
            np.testing.assert_allclose(found, -np.sort(-one, axis=1)[:, :num_tops], atol=1e-4)
            np.testing.assert_allclose(logprobs[row, : len(one)], found, atol=1e-4)
            rest = np.exp(one)
            np.put_along_axis(rest, order, 0.0, axis=1)
            np.testing.assert_allclose(log_rest[row, : len(one)], np.log(rest.sum(axis=1)), atol=1e-4)
    single = engine.logprobs(sequences[1], temperature=0.5, top_k=100)
    assert [part.shape for part in single] == [(32, 100), (32, 100), (32,)]


@pytest.mark.parametrize("options", [{}, PREEMPTED, {"async_scheduling": False}], ids=["roomy", "preempted", "one"])
def test_continuations_are_scored_as_by_a_dense_model_and_each_context_is_computed_once(tiny, options) -> None:
    flat = [(index, one) for index, each in enumerate(CONTINUATIONS) for one in each]
    order = RNG.permutation(len(flat))
    temperatures = RNG.choice([1.0, 0.5], len(CONTEXTS))
    with Engine(tiny, **SIZES | options) as engine:
        rows = [flat[index] for index in order]
        for index in range(3 if "num_blocks" in options else 0):  # They grow, and take pages from later requests.
            engine.add_request(str(index), [3 + index] * 20, SamplingParams(max_tokens=100, ignore_eos=True))
        scores = engine.score(
            [CONTEXTS[index] for index, _ in rows],
            [one for _, one in rows],
            temperature=[float(temperatures[index]) for index, _ in rows],
        )
        stats = engine.stats()
        by_context = engine.score(CONTEXTS, CONTINUATIONS, temperature=np.repeat(temperatures, 4).tolist())
        each = [some[1:3] for some in CONTINUATIONS[:2]]
        whole, later = (engine.score(CONTEXTS[:2], each, from_position=first) for first in (0, 3))
    assert scores.context_indices.tolist() == list(range(len(flat)))
    assert by_context.context_indices.tolist() == [index for index, _ in flat]
    for row, (index, continuation) in enumerate(rows):
        context, length = CONTEXTS[index], len(continuation)
        exact = log_softmax([*context, *continuation], temperatures[index])[len(context) - 1 : -1]
        wanted = exact[np.arange(length), continuation]
        np.testing.assert_allclose(scores.logprobs[row, :length], wanted, atol=1e-4)
        np.testing.assert_allclose(scores.sums[row], wanted.sum(), atol=1e-4)
        assert scores.mask[row].tolist() == [place < length for place in range(12)]
        greedy = exact.argmax(axis=1) == continuation
        assert scores.is_greedy[row, :length].tolist() == greedy.tolist()
        np.testing.assert_allclose(by_context.sums[order[row]], scores.sums[row], atol=1e-4)
    assert later.mask[1].tolist() == [False] * 3 + [True] * 9
    np.testing.assert_allclose(later.logprobs[:, 3:], whole.logprobs[:, 3:], atol=1e-5)
    np.testing.assert_allclose(later.sums, later.logprobs.sum(axis=1), atol=1e-5)
    num_distinct = sum(map(len, CONTEXTS)) + sum(len(one) for _, one in flat)
    if not options.get("num_blocks"):
        assert stats["step_tokens"] <= 1.05 * num_distinct
    assert stats["preemptions"] > 0 or "num_blocks" not in options


def test_more_continuations_than_fit_together_are_scored_in_parts(tiny) -> None:
    context = CONTEXTS[4]
    answers = [RNG.integers(1, VOCAB, 40).tolist() for _ in range(20)]
    with Engine(tiny, **{**SIZES, "num_blocks": 25}) as engine:
        scores = engine.score([context], [answers])
    for row, answer in enumerate(answers):
        exact = log_softmax([*context, *answer])[len(context) - 1 : -1]
        np.testing.assert_allclose(scores.sums[row], exact[np.arange(40), answer].sum(), atol=1e-3)


@pytest.mark.filterwarnings("error")
def test_a_context_is_computed_once_for_all_temperatures_and_low_ones_leave_nothing(tiny: str) -> None:
    context, temperatures = CONTEXTS[4], [1.0, 0.5, 0.25, 2.0]
    with Engine(tiny, **SIZES, max_logprobs=100, enable_prefix_caching=False) as engine:
        scores = engine.score([context], [[[7, 8]] * 4], temperature=temperatures)
        assert engine.stats()["step_tokens"] <= len(context) + 2 * 4
        _, _, log_rest = engine.logprobs(context, top_k=3, temperature=0.002)
    for row, temperature in enumerate(temperatures):
        exact = log_softmax([*context, 7, 8], temperature)[len(context) - 1 : -1]
        np.testing.assert_allclose(scores.logprobs[row], exact[[0, 1], [7, 8]], atol=1e-4)
    assert float(log_rest.min()) < -100


def test_token_ids_may_be_arrays_and_scalars_of_jax(engine: Engine) -> None:
    ids, ends = [5, 6, 7], [[8, 9], [10]]
    scalars, arrays = [jnp.int32(one) for one in ids], [jnp.array(one) for one in ends]
    plain = engine.score([ids, ids], ends).sums
    assert np.array_equal(engine.score([scalars, jnp.array(ids)], arrays).sums, plain)
    assert np.array_equal(engine.score([scalars], [[[jnp.int32(8), 9], arrays[1]]]).sums, plain)
    assert np.array_equal(engine.logprobs(scalars), engine.logprobs(ids))
    params = SamplingParams(max_tokens=2, allowed_token_ids=jnp.array([4, 5]), logit_bias={5: jnp.float32(9)})
    assert [one.token_ids for one in engine.generate(scalars, params)[0].outputs] == [(5, 5)]


def test_what_cannot_be_scored_is_refused_in_one_line(engine: Engine) -> None:
    for arguments, message in (
        (([[5]], [[]]), "continuation of context 0: got no token, allowed: at least one"),
        (([[]], [[5]]), "context 0: got no token, allowed: at least one"),
        (([[5], [6]], [[5]]), "continuations: got 1 for 2 contexts"),
        (([[5, 6]], [[[7], [8], [VOCAB]]]), f"continuation 2: prompt: got token id {VOCAB}, out of vocabulary"),
        (([[5] * 120], [[6] * 9]), "continuation 0: This model's .* is 128 tokens, but your prompt has 129 tokens"),
        (([[5]], [[6] * 999]), "continuation 0: This model's .* is 128 tokens, but your prompt has 1000 tokens"),
        ((5, [[6]]), "contexts: got 5, allowed: a list"),
    ):
        with pytest.raises(InvalidRequestError, match=f"^{message}"):
            engine.score(*arguments)
    with pytest.raises(InvalidRequestError, match=r"^from_position: got 2, and continuation 0 of 2 tokens"):
        engine.score([[5]], [[6, 7]], from_position=2)
    with pytest.raises(InvalidRequestError, match=r"^temperature: got 2 for 1 rows"):
        engine.score([[5]], [[6, 7]], temperature=[1.0, 1.0])
    ids = [5, 6, 7]
    for options, message in (
        ({"top_k": 101}, r"top_k: got 101, allowed: an integer in \[1, 100\]"),
        ({"top_k": 0}, r"top_k: got 0, allowed: an integer in \[1, 100\]"),
        ({"token_ids": np.zeros((2, 101), int)}, "token_ids: got S of 101, allowed: 1 to max_logprobs, 100"),
        ({"token_ids": np.zeros((3, 2), int)}, r"token_ids: got int64 \[3, 2\], allowed: integers \[2, S\]"),
        ({"token_ids": np.full((2, 1), VOCAB)}, f"token_ids: got token id {VOCAB}, allowed: 0 to {VOCAB - 1}"),
        ({"token_ids": np.zeros((2, 1))}, "token_ids: got float64"),
        ({"top_k": 2, "hidden": True}, "top_k and hidden: got several"),
        ({"token_ids": [[1, 2], [3]]}, r"token_ids: got .*, allowed: an array, or lists of one length"),
        ({"temperature": {}}, "temperature: got an object of 0 keys, allowed: a number"),
    ):
        with pytest.raises(InvalidRequestError, match=f"^{message}"):
            engine.logprobs(ids, **options)
    for ragged in ([[1, [2, 3]]], [[1, 2], [[1, 2], [3]]], [[1], 2]):
        with pytest.raises(InvalidRequestError, match=r"^ids: got"):
            engine.logprobs(ragged)
    with pytest.raises(
        InvalidRequestError, match=r"^ids: got an object of 2 keys, .*give each row without its padding, as a list"
    ):
        engine.logprobs({"prompt_token_ids": np.ones((2, 2), int), "mask": np.ones((2, 2), bool)})
    with pytest.raises(InvalidRequestError, match=r"^ids: got a traced array, .* outside of jitted functions"):
        jax.jit(engine.logprobs)(jnp.ones(3, int))
    with pytest.raises(InvalidRequestError, match=r"^prompt: got SamplingParams, .* request id, prompt, parameters"):
        engine.add_request("a prompt", SamplingParams())
    with pytest.raises(ContextLengthError, match=r"is 128 tokens, but your prompt has 128 tokens, and hidden"):
        engine.logprobs([5] * 128, hidden=True)
    for name, value in (("mask", [[1], [1, 0]]), ("lengths", [[1], [1, 2]])):
        with pytest.raises(InvalidRequestError, match=f"^{name}: got"):
            engine.generate({"prompt_token_ids": np.ones((2, 2), int), name: value})
    assert engine.logprobs(ids).shape == (2,)
