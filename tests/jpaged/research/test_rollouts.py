"""Rollouts of `Engine.submit`: groups as arrays from the engine's own thread, while others score and update weights."""

import gc
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import jax
import numpy as np
import pytest

from jpaged import ConfigError, Engine, InvalidRequestError, SamplingParams
from jpaged.errors import EngineStoppedError
from jpaged.research.arrays import GenerationArrays

from ..tiny_model import SIZES, reference_logits
from .trainer_requests import NEW, OLD, PARAMS, PROMPTS

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
GROUPS = replace(PARAMS, n=2, max_tokens=12)


@pytest.fixture
def engine(tiny):
    with Engine(tiny, params=OLD, **SIZES, num_decode_steps=4) as engine:
        yield engine


def rows(arrays: GenerationArrays) -> list[tuple[int, tuple[int, ...]]]:
    """Return (prompt index, tokens) of each sample."""
    each = zip(arrays.prompt_indices.tolist(), np.asarray(arrays.tokens), np.asarray(arrays.mask), strict=True)
    return [(index, tuple(tokens[mask].tolist())) for index, tokens, mask in each]


def prompts_until(is_over: threading.Event, read: list[int]) -> Iterator[list[int]]:
    """Yield prompts, and note their indices in `read`, until the event is set."""
    for index in count():
        if is_over.is_set():
            return
        read.append(index)
        yield PROMPTS[index % len(PROMPTS)]


def prompts_without_end(read: list[int]) -> Iterator[list[int]]:
    return prompts_until(threading.Event(), read)


def test_groups_are_those_of_generate_in_the_order_of_their_ends_or_of_the_prompts(engine: Engine) -> None:
    wanted = rows(engine.generate(PROMPTS, GROUPS, return_arrays=True))
    with engine.submit(PROMPTS, GROUPS, max_in_flight=3) as rollouts:
        found = [row for group in rollouts for row in rows(group)]
        assert sorted(found) == sorted(wanted)
        assert rollouts.num_in_flight == 0
    lens = [4, 30, 8, 20, 5, 6]
    each = [replace(GROUPS, n=1, max_tokens=length) for length in lens]
    with engine.submit(PROMPTS, each, in_order=True) as rollouts:
        groups = [rollouts.take(4), rollouts.take(4)]
    assert [group.prompt_indices.tolist() for group in groups] == [[0, 1, 2, 3], [4, 5]]
    assert groups[0].mask.sum(axis=1).tolist() == lens[:4]
    with pytest.raises(StopIteration):
        next(rollouts)
    assert not engine.requests
    longest = groups[0].prompt_tokens.shape[1]
    for width in (longest + 3, longest):  # Wider, and back.
        groups[0] = groups[0].with_prompt_len(width)
        assert groups[0].prompt_tokens.shape == groups[0].prompt_mask.shape == (4, width)
        prompts = [row[mask].tolist() for row, mask in zip(groups[0].prompt_tokens, groups[0].prompt_mask, strict=True)]
        assert prompts == PROMPTS[:4]
        assert bool(groups[0].prompt_mask[:, -1].all())
    with pytest.raises(InvalidRequestError, match=f"prompt_len: got 1, allowed: an integer ≥ {longest}"):
        groups[0].with_prompt_len(1)


def test_as_many_prompts_are_read_as_may_be_in_flight_and_closing_aborts_them(engine: Engine) -> None:
    read: list[int] = []
    with engine.submit(prompts_without_end(read), GROUPS, max_in_flight=5) as rollouts:
        for num_taken in range(1, 8):
            assert len(read) == num_taken + 4
            next(rollouts)
        engine.add_request("other", PROMPTS[0], replace(PARAMS, max_tokens=3))
    assert len(read) == 12
    (output,) = engine.run_until_done()
    assert output.request_id == "other"
    assert not engine.requests
    with pytest.raises(StopIteration):
        next(rollouts)


def test_errors_are_raised_where_their_group_would_come_and_the_others_go_on(engine, monkeypatch) -> None:
    long = [3] * SIZES["max_model_len"]
    with engine.submit([PROMPTS[0], long, PROMPTS[1]], GROUPS) as rollouts:
        with pytest.raises(InvalidRequestError, match=r"prompt 1: This model's maximum context length is 128"):
            next(rollouts)
        assert sorted(int(group.prompt_indices[0]) for group in rollouts) == [0, 2]
    dispatch = engine.runner.dispatch
    with engine.submit(PROMPTS[:2], replace(GROUPS, max_tokens=90)) as rollouts:
        engine.sleep(mode="keep")
        with pytest.raises(ConfigError, match="submit: got an engine that sleeps"):
            next(rollouts)
        engine.wake_up()
        assert len(rollouts.take(2).errors) == 4
    with engine.submit(PROMPTS[:3], GROUPS, max_in_flight=2) as rollouts:
        while not all(request.state.is_finished for request in list(engine.requests.values())):
            time.sleep(0.01)
        engine.sleep(mode="keep")
        ended = rollouts.take(2)  # What has ended is given; the third prompt is read later.
        assert ended.is_aborted.tolist() == [False] * 4
        with pytest.raises(ConfigError, match="submit: got an engine that sleeps"):
            next(rollouts)
        engine.wake_up()
        assert next(rollouts).prompt_indices.tolist() == [2, 2]
    monkeypatch.setattr(engine.runner, "dispatch", lambda inputs: 1 / 0)
    with engine.submit(PROMPTS[:1], GROUPS) as rollouts, pytest.raises(ZeroDivisionError):
        next(rollouts)
    monkeypatch.setattr(engine.runner, "dispatch", dispatch)
    with monkeypatch.context() as patched:  # A fault outside of the step ends the requests too, and no caller waits.
        patched.setattr(engine.loop, "advance", lambda: 1 / 0)
        with engine.submit(PROMPTS[:1], GROUPS) as rollouts, pytest.raises(ZeroDivisionError):
            next(rollouts)
    with engine.submit(PROMPTS[:1], replace(GROUPS, max_tokens=90)) as rollouts:
        engine.sleep()
        engine.wake_up()
        aborted = next(rollouts)
        assert (aborted.is_aborted.all(), aborted.is_truncated.all()) == (True, True)
        assert int(aborted.mask.sum()) < 180
    rollouts = engine.submit(prompts_without_end([]), GROUPS)
    engine.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        next(rollouts)
    with pytest.raises(RuntimeError, match="shut down"):
        engine.submit([], GROUPS)


def test_refused_prompts_count_and_come_in_their_place(engine) -> None:
    """Else an iterator without end whose prompts are all refused would be read for ever."""
    read: list[int] = []
    refused = ([3] * SIZES["max_model_len"] for _ in prompts_without_end(read))
    with engine.submit(refused, GROUPS, max_in_flight=3) as rollouts:
        assert len(read) == 3
        with pytest.raises(InvalidRequestError, match="prompt 0"):
            next(rollouts)
        assert len(read) == 4
    prompts = [PROMPTS[0], [-1], PROMPTS[1]]
    with engine.submit(prompts, GROUPS, in_order=True) as rollouts:
        assert rollouts.take(1).prompt_indices.tolist() == [0, 0]
        with pytest.raises(InvalidRequestError, match="prompt 1"):
            rollouts.take(2)
        assert rollouts.take(2).prompt_indices.tolist() == [2, 2]
    options: dict[str, Any]
    for options, name in (({"n": 99}, "n"), ({"logprobs": 50}, "logprobs"), ({"logprobs": -1}, "logprobs")):
        with pytest.raises(InvalidRequestError, match=f"^{name}: got"):
            engine.submit(prompts_without_end([]), replace(GROUPS, **options))
    with pytest.raises(InvalidRequestError, match="priority: got 1 under scheduling_policy fcfs"):
        engine.submit(prompts_without_end([]), GROUPS, priority=1)
    with engine.submit(PROMPTS, GROUPS, max_in_flight=4) as rollouts:
        for wrong in ("3", None, True, 1.5, 0, 5):
            with pytest.raises(InvalidRequestError, match="num_groups: got"):
                rollouts.take(wrong)


def test_no_group_is_lost_by_an_iterator_that_raises_or_by_ids_and_limits(engine, tiny) -> None:
    def breaks_after(num_prompts: int) -> Iterator[list[int]]:
        yield from PROMPTS[:num_prompts]
        raise OSError("no more")

    for max_in_flight in (2, 4):
        with engine.submit(breaks_after(2), GROUPS, max_in_flight=max_in_flight, in_order=True) as rollouts:
            assert [int(next(rollouts).prompt_indices[0]) for _ in range(2)] == [0, 1]
            with pytest.raises(OSError, match="no more"):
                next(rollouts)
            with pytest.raises(StopIteration):
                next(rollouts)

    def is_interrupted() -> Iterator[list[int]]:
        yield PROMPTS[0]
        raise KeyboardInterrupt

    with engine.submit(is_interrupted(), GROUPS, max_in_flight=1) as rollouts:
        with pytest.raises(KeyboardInterrupt):
            next(rollouts)
        assert [int(group.prompt_indices[0]) for group in rollouts] == [0]
    with Engine(tiny, params=OLD, **SIZES, limits={"waiting_requests": 2}) as other:
        other.add_request("submit-1", PROMPTS[0], replace(PARAMS, max_tokens=60))
        with other.submit(PROMPTS * 3, GROUPS, max_in_flight=8) as rollouts:
            assert [len(rollouts.take(6).tokens) for _ in range(3)] == [12, 12, 12]


def test_rollouts_that_nobody_holds_compute_no_more(engine) -> None:
    read: list[int] = []
    for group in engine.submit(prompts_without_end(read), replace(GROUPS, max_tokens=60)):
        assert group.tokens.shape == (2, 60)
        break
    wait_until_idle(engine)  # They end with the step that was computed meanwhile.
    assert engine.stats()["idle_faults"] == 0
    assert engine.stats()["generation_tokens"] < 2 * 60 * len(read), "the others were not computed to their end"


LIMIT_S = 60
BUSY_S = 5.0


@pytest.fixture
def held_step(engine, monkeypatch):
    """Two events: a step waits, as one that compiles a program does, and it may go on; it goes on after BUSY_S."""
    begun, may_go_on, dispatch = threading.Event(), threading.Event(), engine.runner.dispatch

    def slow(inputs):
        begun.set()
        may_go_on.wait(BUSY_S)
        return dispatch(inputs)

    monkeypatch.setattr(engine.runner, "dispatch", slow)
    yield begun, may_go_on
    may_go_on.set()


def wait_until_idle(engine: Engine) -> None:
    deadline = time.monotonic() + LIMIT_S
    while engine.requests and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine.requests


def test_prompts_are_queued_and_ended_groups_taken_while_a_step_is_computed(engine, held_step) -> None:
    begun, may_go_on = held_step
    may_go_on.set()
    wanted = [engine.generate([prompt], GROUPS, return_arrays=True) for prompt in PROMPTS[:5]]
    ended = engine.submit(PROMPTS[:2], GROUPS)
    while not all(request.state.is_finished for request in list(engine.requests.values())):
        time.sleep(0.01)
    may_go_on.clear()
    begun.clear()
    start_s = time.monotonic()
    with engine.submit(PROMPTS[2:3], GROUPS) as first:
        assert begun.wait(LIMIT_S)
        second = engine.submit(PROMPTS[3:5], GROUPS)  # Queued behind the step.
        groups = [ended.take(1), next(ended)]
        dropped = engine.submit(PROMPTS, GROUPS)
        dropped.close()
        assert time.monotonic() - start_s < BUSY_S / 2
        may_go_on.set()
        groups += [first.take(1), *second]
    found = {int(one.prompt_mask[0].sum()): one for one in groups}  # The lengths of the prompts differ.
    for one in wanted:
        group = found.pop(int(one.prompt_mask[0].sum()))
        assert np.array_equal(group.tokens, one.tokens)
        assert np.array_equal(group.logprobs, one.logprobs)
    assert not found
    wait_until_idle(engine)


@pytest.mark.parametrize("call", ["take", "submit"])
def test_an_interrupt_during_a_step_is_raised_at_once_and_leaves_nothing_running(engine, held_step, call) -> None:
    begun, may_go_on = held_step

    def interrupt() -> None:
        begun.wait(LIMIT_S)
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def waiting_prompts() -> Iterator[list[int]]:
        yield from PROMPTS[:2]
        begun.wait(LIMIT_S)
        time.sleep(LIMIT_S)

    def run_until_interrupted() -> None:
        with engine.submit(PROMPTS[:3], GROUPS) as rollouts:
            if call == "submit":
                engine.submit(waiting_prompts(), GROUPS)
            rollouts.take(1)

    sender = threading.Thread(target=interrupt)
    sender.start()
    start_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted()
    assert time.monotonic() - start_s < 2
    sender.join()
    may_go_on.set()
    wait_until_idle(engine)
    assert engine.stats()["idle_faults"] == 0
    assert len(engine.submit(PROMPTS[:1], GROUPS).take(1).tokens) == 2


def test_closing_rollouts_ends_the_wait_of_another_thread(engine, held_step) -> None:
    begun, may_go_on = held_step
    rollouts = engine.submit(PROMPTS[:1], GROUPS)
    assert begun.wait(LIMIT_S)
    taken: list[Any] = []
    taker = threading.Thread(target=lambda: taken.extend(rollouts))
    taker.start()
    rollouts.close()
    may_go_on.set()
    taker.join(LIMIT_S)
    assert not taker.is_alive()
    assert taken == []


def test_a_prompt_that_is_read_while_another_thread_closes_the_rollouts_is_not_computed(engine) -> None:
    reads, may_read = threading.Event(), threading.Event()

    def slow_prompts() -> Iterator[list[int]]:
        yield PROMPTS[0]
        reads.set()
        may_read.wait(LIMIT_S)
        yield PROMPTS[1]

    rollouts = engine.submit(slow_prompts(), GROUPS, max_in_flight=1)
    groups: list[GenerationArrays] = []
    taker = threading.Thread(target=lambda: groups.extend(rollouts))
    taker.start()
    assert reads.wait(LIMIT_S)
    rollouts.close()
    wait_until_idle(engine)
    num_drawn = engine.stats()["generation_tokens"]
    may_read.set()
    taker.join(LIMIT_S)
    assert not taker.is_alive()
    assert len(groups) == 1, "it had ended before"
    num_drawn += engine.generate(PROMPTS[1:2], GROUPS, return_arrays=True).mask.sum()  # Behind what would be queued.
    wait_until_idle(engine)
    assert engine.stats()["generation_tokens"] == num_drawn


def test_an_engine_is_shut_down_at_once_while_a_program_compiles(engine, caplog) -> None:
    """A compilation cannot be ended: nothing waits for it, and nothing is told of it."""
    begun, may_go_on, raised = threading.Event(), threading.Event(), []

    def lower() -> None:
        begun.set()
        may_go_on.wait(LIMIT_S)

    def generate() -> None:
        try:
            engine.generate(PROMPTS[:1], GROUPS)
        except RuntimeError as error:
            raised.append(str(error))

    engine.plan.programs = dict.fromkeys(engine.plan.programs, lower)
    rollouts = engine.submit(PROMPTS[:2], GROUPS)
    other = threading.Thread(target=generate)
    other.start()
    assert begun.wait(LIMIT_S)
    start_s = time.monotonic()
    engine.shutdown()
    other.join(LIMIT_S)
    assert time.monotonic() - start_s < 2
    may_go_on.set()
    with pytest.raises(EngineStoppedError, match="shut down"):
        rollouts.take(1)
    assert raised == ["this engine was shut down; make a new one"]
    assert not caplog.records
    assert (engine.stats()["blocks_used"], engine.stats()["idle_faults"]) == (0, 0)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_rollouts_dropped_while_a_function_is_traced_are_ended(engine) -> None:
    """Garbage is collected anywhere; a mesh, for example, cannot be left within a traced function."""
    held = [engine.submit(PROMPTS[:1], replace(GROUPS, max_tokens=90))]
    engine.sleep(mode="keep")
    num_drawn = engine.stats()["generation_tokens"]

    @jax.jit
    def traced(x: jax.Array) -> jax.Array:
        held.clear()
        gc.collect()
        return x

    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        traced(np.float32(1))
    assert not held
    engine.wake_up()
    wait_until_idle(engine)
    assert engine.stats()["generation_tokens"] == num_drawn


def logprobs_of(arrays: GenerationArrays, row: int, in_flight: str, num_before: int = 0) -> np.ndarray:
    """Return the logprob of each token of a sample by the weights that its versions name; odd ones are NEW's.

    The other weights have computed the first `num_before` tokens of the prompt.
    """
    prompt = np.asarray(arrays.prompt_tokens[row])[np.asarray(arrays.prompt_mask[row])].tolist()
    mask = np.asarray(arrays.mask[row])
    tokens, seeds = np.asarray(arrays.tokens[row])[mask], np.asarray(arrays.versions[row])[mask] % 2
    first, ids = len(prompt) - 1, [*prompt, *tokens.tolist()]
    if in_flight == "keep":  # Position p was computed when token p + 1 was drawn, and stays as it is.
        of_prompt = [1 - int(seeds[0])] * num_before + [int(seeds[0])] * (first - num_before)
        logits = reference_logits(ids[:-1], of_prompt + seeds.tolist())[first:]
    else:
        by_version = [reference_logits(ids[:-1], seed)[first:] for seed in (0, 1)]
        logits = np.stack([by_version[seed][index] for index, seed in enumerate(seeds)])
    logits -= logits.max(axis=1, keepdims=True)
    return logits[np.arange(len(tokens)), tokens] - np.log(np.exp(logits).sum(axis=1))


@pytest.mark.parametrize(
    ("in_flight", "num_updates"),
    [
        pytest.param("keep", 12, marks=pytest.mark.slow),
        ("recompute", 6),
        *(pytest.param(mode, 200, marks=pytest.mark.slow) for mode in ("keep", "recompute")),
    ],
)
def test_weights_change_from_a_second_thread_while_a_third_scores(tiny: str, in_flight: str, num_updates: int) -> None:
    """Each logprob is that of the weights that its version names, and no group is lost or comes twice."""
    read: list[int] = []
    scored = [(prompt * 6)[:120] for prompt in PROMPTS[:2]]  # Several chunks, so that updates come between them.
    faults: list[Exception] = []
    with Engine(tiny, params=OLD, **SIZES, num_decode_steps=4) as engine:
        wanted = [np.asarray(engine.logprobs(scored))]
        engine.update_params(NEW, version=1)
        wanted.append(np.asarray(engine.logprobs(scored)))
        engine.update_params(OLD, version=2)
        is_over = threading.Event()

        def guarded(work: Any) -> threading.Thread:
            def run() -> None:
                try:
                    work()
                except Exception as error:
                    faults.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        def update() -> None:
            for version in range(3, 3 + num_updates):
                engine.update_params(NEW if version % 2 else OLD, version=version, in_flight=in_flight)
                is_over.wait(0.05)

        def score() -> None:
            while not is_over.is_set():
                assert engine.params
                assert not engine.is_sleeping(), "an update lacks weights for a moment, which nobody sees"
                scores = np.asarray(engine.logprobs(scored))
                distances = [np.abs(scores - one).max(axis=1) for one in wanted]
                assert (np.minimum(*distances) < 1e-5).all(), "scores of one version each"

        with engine.submit(prompts_until(is_over, read), GROUPS, max_in_flight=32) as rollouts:
            updating, scoring = guarded(update), guarded(score)
            groups = []
            for group in rollouts:
                groups.append(group)
                if not updating.is_alive():
                    is_over.set()
            scoring.join()
        assert not faults
        assert engine.stats()["recompiles"] == 0
    assert sorted(int(group.prompt_indices[0]) for group in groups) == read
    mixed = [group for group in groups if len(set(np.asarray(group.versions)[np.asarray(group.mask)].tolist())) > 1]
    assert mixed
    num_split = 0
    for group in groups if num_updates == 200 else [*mixed[:10], *groups[-4:]]:
        for row in range(2):
            got = np.asarray(group.logprobs[row])[np.asarray(group.mask[row])]
            distance = np.abs(got - logprobs_of(group, row, in_flight)).max()
            if in_flight == "keep" and distance >= 1e-4:
                # The weights have changed between two chunks of the prompt.
                prompt_len = int(group.prompt_mask[row].sum())
                each = [logprobs_of(group, row, in_flight, num_before) for num_before in range(1, prompt_len)]
                num_split += 1
                distance = min(np.abs(got - one).max() for one in each)
            assert distance < 1e-4
    assert num_split <= 0.02 * 2 * len(groups), "few updates come between two chunks of one prompt"


def test_stop_strings_end_samples_in_arrays_where_they_end_outputs(engine: Engine) -> None:
    """Programs of four tokens draw more than the one that completes a stop string."""
    params = replace(GROUPS, n=3, max_tokens=24, detokenize=True, logprobs=2)
    texts = [sample.text for output in engine.generate(PROMPTS, params) for sample in output.outputs]
    stopped = replace(params, stop=[text[5 + index : 7 + index] for index, text in enumerate(texts[:9])], min_tokens=3)
    outputs = engine.generate(PROMPTS, stopped)
    wanted = GenerationArrays.of(outputs, max_tokens=24, num_tops=2)
    lens = wanted.mask.sum(axis=1)
    assert len({int(one) % 4 for one in lens if one < 24}) > 2, "ends anywhere in a program of four tokens"
    names = "tokens", "logprobs", "top_token_ids", "top_logprobs", "mask", "is_truncated", "versions", "prompt_tokens"
    found = engine.generate(PROMPTS, stopped, return_arrays=True)
    for name in names:
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name
    shown = replace(stopped, include_stop_str_in_output=True)
    for output in engine.generate(PROMPTS, shown):
        for sample in output.outputs:
            whole = engine.handle.tokenizer.decode(sample.token_ids)
            assert sample.finish_reason == "length" or sample.stop_reason in whole[-3:], "the last token completes it"
    with engine.submit(PROMPTS, stopped, max_in_flight=6, in_order=True) as rollouts:
        assert rows(rollouts.take(len(PROMPTS))) == rows(wanted)
    conversations = [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "c"}]]
    wanted = GenerationArrays.of(engine.chat(conversations, stopped), max_tokens=24, num_tops=2)
    assert rows(engine.chat(conversations, stopped, return_arrays=True)) == rows(wanted)


def test_outputs_of_steps_become_arrays(engine: Engine) -> None:
    wanted = engine.generate(PROMPTS, GROUPS, return_arrays=True)
    outputs = engine.generate(PROMPTS, GROUPS)
    found = GenerationArrays.of(outputs, max_tokens=12)
    for name in ("prompt_tokens", "prompt_mask", "tokens", "logprobs", "mask", "is_truncated", "versions"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name
    assert np.array_equal(found.prompt_indices, wanted.prompt_indices)
    tops = replace(GROUPS, logprobs=3)
    wanted, likeliest = engine.generate(PROMPTS, tops, return_arrays=True), engine.generate(PROMPTS, tops)
    for num_tops in (1, 3):
        found = GenerationArrays.of(likeliest, max_tokens=12, num_tops=num_tops)
        assert np.array_equal(found.top_token_ids, wanted.top_token_ids[..., :num_tops])
        assert np.array_equal(found.top_logprobs, wanted.top_logprobs[..., :num_tops])
    with pytest.raises(InvalidRequestError, match=r"outputs: got .* with fewer than 4 most likely tokens"):
        GenerationArrays.of(likeliest, num_tops=4)
    engine.add_request("deltas", PROMPTS[0], replace(GROUPS, output_kind="delta"))
    (first,) = engine.step()
    (second,) = engine.step()
    assert GenerationArrays.of([first]).mask.all()
    with pytest.raises(InvalidRequestError, match="outputs: got deltas, a delta, allowed: outputs with all tokens"):
        GenerationArrays.of([second])
    plain = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False))
    with pytest.raises(InvalidRequestError, match=r"outputs: got .* without logprobs"):
        GenerationArrays.of(plain)
    with pytest.raises(InvalidRequestError, match="max_tokens: got 11, allowed: an integer ≥ 12"):
        GenerationArrays.of(outputs, max_tokens=11)
