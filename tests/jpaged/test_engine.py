"""`Engine` as Python callers use it, on a tiny random model."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jpaged import BeamSearchParams, ConfigError, ContextLengthError, Engine, InvalidRequestError, SamplingParams
from jpaged.core.step_record import StepRecord

from .tiny_model import SIZES

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = ["one", "two and three", [20, 30, 40], {"prompt": "four"}, {"prompt_token_ids": [9, 8, 7]}]


@pytest.fixture(scope="module")
def engine(tiny: str) -> Iterator[Engine]:
    with Engine(tiny, **SIZES) as engine:
        yield engine


def tokens(outputs: list) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_every_form_of_prompt_is_taken_and_outputs_keep_the_order(engine: Engine) -> None:
    outputs = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    alone = [engine.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
    assert tokens(outputs) == tokens(alone)
    assert outputs[2].prompt is None
    assert outputs[2].prompt_token_ids == (20, 30, 40)
    for array in (np.array([20, 30, 40]), jax.numpy.array([20, 30, 40]), [np.int64(20), 30, 40]):
        assert tokens(engine.generate(array, GREEDY, use_tqdm=False)) == [outputs[2].outputs[0].token_ids]


CALLS: dict[str, Callable[[Engine, Any], Any]] = {
    "generate": lambda engine, ids: engine.generate(ids, GREEDY),
    "generate, arrays": lambda engine, ids: engine.generate(ids, GREEDY, return_arrays=True),
    "logprobs": lambda engine, ids: engine.logprobs([list(ids)]),
    "score": lambda engine, ids: engine.score([ids], [ids]),
    "submit": lambda engine, ids: engine.submit([ids], GREEDY),
    "update_params": lambda engine, ids: engine.update_params({"a": ids}),
    "params": lambda engine, ids: engine.params,
    "add_request": lambda engine, ids: engine.add_request("traced", ids, GREEDY),
    "step": lambda engine, ids: engine.step(),
    "abort_request": lambda engine, ids: engine.abort_request("traced"),
    "pin_prefix": lambda engine, ids: engine.pin_prefix(ids),
    "sleep": lambda engine, ids: engine.sleep(1),
    "Engine": lambda engine, ids: Engine("no model"),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_from_functions_that_jax_traces_are_refused_also_with_constants(engine: Engine, call: str) -> None:
    message = (
        rf"^{call.partition(',')[0]}: got a call from a function that JAX traces, allowed: calls outside of .*; call"
    )
    constant = np.array([20, 30, 40])
    for trace in (jax.jit, jax.grad):
        with pytest.raises(ConfigError, match=message) as caught:
            trace(lambda x: [x, CALLS[call](engine, constant)][0])(1.0)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=message):
        jax.jit(lambda ids: [ids, CALLS[call](engine, ids)][0])(constant)


def test_a_group_of_rollouts_cannot_be_taken_by_a_function_that_jax_traces(engine: Engine) -> None:
    with engine.submit([[20, 30, 40]], GREEDY) as rollouts:
        for take in (lambda: rollouts.take(1), lambda: next(rollouts)):
            with pytest.raises(ConfigError, match="got a call from a function that JAX traces"):
                jax.jit(lambda x, take=take: [x, take()][0])(1.0)
        assert rollouts.take(1).tokens.shape == (1, 20)


def step_to_the_end(engine: Engine) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Run two requests, the second one queued after the first step; return their lengths by step and last outputs."""
    engine.add_request("a", "one", GREEDY)
    (first,) = engine.step()
    engine.add_request("b", "two and three", GREEDY)
    seen: dict[str, list[int]] = {"a": [len(first.outputs[0].token_ids)], "b": []}
    final = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id].append(len(output.outputs[0].token_ids))
            if output.finished:
                final[output.request_id] = output
    assert engine.step() == []
    return seen, final


def test_step_by_step_gives_what_generate_gives(engine: Engine) -> None:
    wanted = tokens(engine.generate(["one", "two and three"], GREEDY, use_tqdm=False))
    seen, final = step_to_the_end(engine)
    assert tokens([final["a"], final["b"]]) == wanted
    assert seen["a"][0] == 1, "the first token is shown at once"
    assert all(lens == sorted(set(lens)) and lens[-1] == 20 for lens in seen.values())


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_one_decode_step_at_a_time_shows_one_token_at_a_time(tiny: str, async_scheduling: bool) -> None:
    with Engine(tiny, **SIZES, num_decode_steps=1, async_scheduling=async_scheduling) as engine:
        seen, _ = step_to_the_end(engine)
    assert seen == {"a": list(range(1, 21)), "b": list(range(1, 21))}


def test_an_aborted_request_gives_its_pages_back_in_any_state(engine: Engine) -> None:
    for index in range(10):
        engine.add_request(str(index), "x" * 40, GREEDY)
    engine.step()
    engine.abort_request(["0", "9", "unknown"])  # The first one runs, the last one waits.
    engine.abort_request("0")
    assert engine.get_num_unfinished_requests() == 8
    while engine.has_unfinished_requests():
        assert not {output.request_id for output in engine.step()} & {"0", "9"}
    assert engine.stats()["blocks_used"] == 0


def test_generate_computes_requests_of_add_request_too_and_leaves_their_outputs_to_step(engine: Engine) -> None:
    (wanted,) = engine.generate("one", GREEDY)
    engine.add_request("mine", "one", GREEDY)
    engine.generate("two and three", GREEDY)
    assert engine.get_num_unfinished_requests() == 1
    (output,) = engine.step()
    assert (output.request_id, output.outputs[0].text) == ("mine", wanted.outputs[0].text)
    assert not engine.has_unfinished_requests()


def test_a_step_that_lost_the_device_state_costs_no_tokens(engine: Engine) -> None:
    wanted = tokens(engine.generate(["one", "two and three"], GREEDY, use_tqdm=False))
    engine.add_request("a", "one", GREEDY)
    engine.add_request("b", "two and three", GREEDY)
    engine.step()
    engine.runner.state.cache.pages[0].delete()  # A failed step that was given the cache leaves it so.
    assert engine.step() == []
    final = {}
    while engine.has_unfinished_requests():
        final.update({output.request_id: output for output in engine.step()})
    assert tokens([final["a"], final["b"]]) == wanted
    assert engine.stats()["recompiles"] == 0
    assert tokens(engine.generate(["one", "two and three"], GREEDY, use_tqdm=False)) == wanted


def test_a_seed_fixes_the_draws_and_requests_without_a_seed_draw_by_their_number(tiny: str) -> None:
    free = SamplingParams(temperature=1.5, max_tokens=30, ignore_eos=True)
    seeded = SamplingParams(temperature=1.5, max_tokens=30, ignore_eos=True, seed=-3)
    with Engine(tiny, **SIZES) as first, Engine(tiny, **SIZES) as second:
        ours = tokens(first.generate(["one"] * 3, [free, seeded, free], use_tqdm=False))
        assert len(set(ours)) == 3, "equal prompts, other numbers"
        assert tokens(second.generate(["one"], seeded, use_tqdm=False)) == [ours[1]]
    with Engine(tiny, **SIZES) as again, Engine(tiny, **SIZES, seed=1) as other:
        assert tokens(again.generate(["one"] * 3, [free, seeded, free], use_tqdm=False)) == ours
        theirs = tokens(other.generate(["one"] * 3, [free, seeded, free], use_tqdm=False))
        assert theirs[1] == ours[1]
        assert theirs[0] != ours[0]


def test_a_refused_call_changes_no_later_draws(tiny: str) -> None:
    free = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    drawn = []
    for is_refused in (False, True):
        with Engine(tiny, **SIZES) as engine:
            if is_refused:
                with pytest.raises(InvalidRequestError, match="prompt 2"):
                    engine.generate(["one", "two", "", "three"], free, use_tqdm=False)
            drawn.append(tokens(engine.generate(["one", "two"], free, use_tqdm=False)))
    assert drawn[0] == drawn[1]


def test_samples_that_nothing_is_drawn_for_are_equal(engine: Engine) -> None:
    """At temperature 0, and with a top-p of 0 at any temperature."""
    (alone,) = tokens(engine.generate("one", GREEDY))
    (drawn,) = tokens(engine.generate("one", replace(GREEDY, temperature=1.5, seed=3)))
    assert drawn != alone
    for how in ({}, {"logprobs": 1}, {"temperature": 1.5, "top_p": 0.0, "seed": 3}):
        (output,) = engine.generate("one", replace(GREEDY, n=3, **how))
        assert [tuple(sample.token_ids) for sample in output.outputs] == [alone] * 3


def test_times_of_a_request_are_in_order(engine: Engine) -> None:
    arrival = np.float64(time.monotonic() - 5.0)
    engine.add_request("a", "one", GREEDY, arrival_time=arrival)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    for output in outputs:
        found = output.metrics
        assert type(found.arrival_time) is float
        times = [found.arrival_time, found.first_scheduled_time, found.first_token_time, found.last_token_time]
        assert times == sorted(times)
        assert found.finished_time is None or found.last_token_time <= found.finished_time
    assert outputs[-1].metrics.finished_time is not None


def test_each_stop_rule_ends_the_text_at_its_place(engine: Engine) -> None:
    whole = engine.generate("one", GREEDY, use_tqdm=False)[0].outputs[0]
    stop = whole.text[5:8]
    end = whole.text.index(stop)

    def ended(**options: object) -> object:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **options})
        return engine.generate("one", params, use_tqdm=False)[0].outputs[0]

    cut = ended(stop=stop)
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole.text[:end], "stop", stop)
    assert ended(stop=[stop], include_stop_str_in_output=True).text == whole.text[: end + len(stop)]
    by_id = ended(stop_token_ids=[whole.token_ids[3]])
    assert by_id.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[3]) + 1]
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", whole.token_ids[3])
    assert ended(max_tokens=3).finish_reason == "length"
    assert ended(detokenize=False).text == ""
    to_the_end = ended(max_tokens=None)
    assert len(to_the_end.token_ids) == SIZES["max_model_len"] - 3
    assert to_the_end.finish_reason == "length"


BAD_CALLS = {
    "an id out of vocabulary": lambda engine: engine.generate([["x"], [258]], GREEDY),
    "a bad prompt among good ones": lambda engine: engine.generate(["one", ""], GREEDY),
    "parameters for another number of prompts": lambda engine: engine.generate(["one"], [GREEDY, GREEDY]),
    "parameters of another type": lambda engine: engine.generate("one", 5),
    "a number for a prompt": lambda engine: engine.generate(5, GREEDY),
    "an array without axes": lambda engine: engine.generate(np.array(3), GREEDY),
    "no messages": lambda engine: engine.chat([]),
    "a text for messages": lambda engine: engine.chat("hi"),
    "one message for many": lambda engine: engine.chat({"role": "user", "content": "hi"}),
    "a request id that is no string": lambda engine: engine.add_request([], "one", GREEDY),
    "an arrival time that is no number": lambda engine: engine.add_request("a", "one", GREEDY, arrival_time="now"),
    "an arrival time to come": lambda engine: engine.add_request("a", "one", GREEDY, arrival_time=np.float64(1e12)),
    "bytes for ids": lambda engine: engine.generate(b"one", GREEDY),
    "an array of bytes for ids": lambda engine: engine.generate(bytearray(b"one"), GREEDY),
    "bytes for a prompt's ids": lambda engine: engine.generate([b"one"], GREEDY),
    "nothing for parameters": lambda engine: engine.add_request("a", "one", {}),
    "a priority that is a text": lambda engine: engine.generate("one", GREEDY, priority="high"),
    "more logprobs than the engine gives": lambda engine: engine.generate("one", SamplingParams(logprobs=21)),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_is_refused_before_the_engine_is_touched(engine: Engine, case: str) -> None:
    with pytest.raises(InvalidRequestError):
        BAD_CALLS[case](engine)
    assert not engine.has_unfinished_requests()


MARK = "wild-badger"
QUOTABLE = {
    "a text for messages": lambda engine: engine.chat(MARK),
    "a message for messages": lambda engine: engine.chat({"role": "user", "content": MARK}),
    "bytes for a prompt": lambda engine: engine.generate([MARK.encode()], GREEDY),
    "a text for token ids": lambda engine: engine.logprobs(MARK),
    "a mapping for token ids": lambda engine: engine.logprobs({"prompt": MARK}),
    "texts for token ids": lambda engine: engine.logprobs([[MARK]]),
    "a text for contexts": lambda engine: engine.score(MARK, [[5]]),
    "texts for a context's ids": lambda engine: engine.score([[MARK]], [[5]]),
    "a text for a number for each": lambda engine: engine.score([[5]], [[5]], temperature=MARK),
}


@pytest.mark.parametrize("case", QUOTABLE)
def test_an_error_of_a_call_tells_no_more_of_a_prompt_than_its_kind(engine: Engine, case: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        QUOTABLE[case](engine)
    assert MARK not in str(caught.value)


def test_a_request_id_in_use_is_refused(engine: Engine) -> None:
    engine.add_request("a", "one", GREEDY)
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_request("a", "two", GREEDY)
    engine.abort_request("a")


def test_a_bad_prompt_can_be_returned_as_an_error_among_the_others(engine: Engine) -> None:
    outputs = engine.generate(["one", "", "two"], GREEDY, use_tqdm=False, on_error="return")
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert "empty" in outputs[1].error


def step_by_step(engine: Engine, prompt: Any) -> None:
    engine.add_request("long", prompt, GREEDY)


def submitted(engine: Engine, prompt: Any) -> None:
    with engine.submit(iter([[5], prompt]), SamplingParams(max_tokens=1), in_order=True) as rollouts:
        rollouts.take(2)


TOO_LONG: dict[str, tuple[Callable[[Engine, Any], Any], str]] = {
    "generate": (lambda engine, prompt: engine.generate(["a", prompt], GREEDY, use_tqdm=False), "prompt 1: "),
    "arrays": (
        lambda engine, prompt: engine.generate(["a", prompt], GREEDY, use_tqdm=False, return_arrays=True),
        "prompt 1: ",
    ),
    "beam_search": (
        lambda engine, prompt: engine.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2)),
        "prompt 0: ",
    ),
    "add_request": (step_by_step, ""),
    "submit": (submitted, "prompt 1: "),
}


@pytest.mark.parametrize("call", TOO_LONG)
@pytest.mark.parametrize(
    "prompt", ["x" * 128, "x" * 10_000, [5] * 128, {"messages": [{"role": "user", "content": "x" * 128}]}]
)
def test_too_long_a_prompt_is_the_same_error_in_every_call(engine: Engine, call: str, prompt: Any) -> None:
    run, place = TOO_LONG[call]
    with pytest.raises(ContextLengthError) as caught:
        run(engine, prompt)
    assert str(caught.value).startswith(f"{place}This model's maximum context length is 128 tokens, but your prompt")
    assert (caught.value.code, caught.value.param) == (
        "context_length_exceeded",
        "messages" if isinstance(prompt, dict) else "prompt",
    )
    assert not engine.has_unfinished_requests()


def test_a_warm_prefix_is_not_computed_again_and_changes_no_token(engine: Engine) -> None:
    engine.reset_prefix_cache()
    prompt = list(range(10, 80))
    cold, warm = (engine.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 64)
    assert tokens([cold]) == tokens([warm])
    engine.reset_prefix_cache()
    assert engine.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_shutdown_gives_pages_and_weights_back_and_is_final(tiny: str) -> None:
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    engine = Engine(tiny, **SIZES)
    assert sum(array.nbytes for array in jax.live_arrays()) > before
    engine.shutdown()
    engine.shutdown()
    assert sum(array.nbytes for array in jax.live_arrays()) <= before
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate("one", GREEDY, use_tqdm=False)


def test_compilations_outside_the_engine_are_not_counted_as_recompiles(engine: Engine, tiny: str) -> None:
    with Engine(tiny, **SIZES) as other:
        other.generate("one", GREEDY, use_tqdm=False)
        jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    assert engine.stats()["recompiles"] == 0


def test_pages_that_are_lost_are_told_once_the_engine_is_idle_and_it_goes_on(
    tiny: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(tiny, **SIZES) as engine:
        wanted = tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False))
        assert (engine.stats()["idle_faults"], caplog.messages) == (0, [])
        page, _ = engine.blocks.device.take()
        assert tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == wanted
        assert engine.stats()["idle_faults"] == 1
        assert [message[:52] for message in caplog.messages] == ["1 device pages are lost, though no request has them:"]
        engine.blocks.device.drop_ref(page)
        engine.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert engine.stats()["idle_faults"] == 1


class Observer:
    def __init__(self) -> None:
        self.dispatches: list[StepRecord] = []
        self.retired_numbers: list[int] = []

    def dispatched(self, record: StepRecord) -> None:
        assert not record.is_retired
        self.dispatches.append(record)

    def retired(self, record: StepRecord) -> None:
        assert record.process_s > 0
        self.retired_numbers.append(record.number)


def test_an_observer_is_told_of_every_step_its_rows_and_its_preemptions(tiny: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    with Engine(tiny, **{**SIZES, "num_decode_steps": 1, "num_blocks": 12, "max_model_len": 88}) as engine:
        engine.core.observer = observer = Observer()
        engine.add_request("a", [5] * 70, params)
        engine.add_request("b", [6] * 10, params)
        while engine.has_unfinished_requests():
            engine.step()
        records, stats = observer.dispatches, engine.stats()
        engine.core.observer = None
        engine.generate([[7] * 9], params, use_tqdm=False)
    assert [record.number for record in records] == list(range(1, len(records) + 1)), "none without an observer"
    assert observer.retired_numbers == [record.number for record in records if record.is_retired]
    assert records[0].turns == (("a", 0, 64),)
    assert records[1].turns == (("a", 0, 6), ("b", 0, 10))
    assert [one[:2] for record in records for one in record.preempted] == [("b", "recompute")]
    assert {turn.request_id for turn in records[-1].turns} <= {"a", "b"}
    assert sum(record.num_tokens for record in records) == stats["step_tokens"]
    assert sum(record.num_padded_tokens for record in records) == stats["padded_tokens"]
    assert all(min(record.schedule_s, record.build_s, record.dispatch_s) > 0 for record in records)
