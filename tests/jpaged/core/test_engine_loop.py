"""What an engine's callers get when another thread, an interrupt or an observer comes before their outputs."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jpaged import ConfigError, Engine, InvalidRequestError, SamplingParams
from jpaged.codec import decode, encode
from jpaged.messages import NewRequest
from jpaged.outputs import EngineSummary, LastOutput

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "block_size": 8, "num_blocks": 60}
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
LIMIT_S = 60

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")


@pytest.fixture
def engine(tiny):
    with Engine(tiny, warmup="off", **SIZES) as engine:
        yield engine


@pytest.fixture
def first_step(engine, monkeypatch):
    """Two events: the first step has begun, and it may go on."""
    begun, may_go_on, dispatch = threading.Event(), threading.Event(), engine.runner.dispatch

    def slow(inputs):
        begun.set()
        assert may_go_on.wait(LIMIT_S)
        return dispatch(inputs)

    monkeypatch.setattr(engine.runner, "dispatch", slow)
    return begun, may_go_on


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_a_call_keeps_the_output_of_a_request_that_another_thread_aborts(engine, first_step):
    begun, may_go_on = first_step
    with ThreadPoolExecutor(2) as pool:
        generated = pool.submit(engine.generate, PROMPTS, PARAMS)
        assert begun.wait(LIMIT_S)
        aborted = pool.submit(engine.abort_request, "generate-1")
        while not engine.loop.lock._calls:
            threading.Event().wait(0.001)
        may_go_on.set()
        aborted.result(LIMIT_S)
        outputs = generated.result(LIMIT_S)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "abort", "length"]
    again = engine.generate(PROMPTS, PARAMS)
    assert [tokens(outputs)[index] for index in (0, 2)] == [tokens(again)[index] for index in (0, 2)]


def test_a_call_whose_engine_is_shut_down_raises(engine, first_step):
    begun, may_go_on = first_step
    with ThreadPoolExecutor(2) as pool:
        generated = pool.submit(engine.generate, PROMPTS * 9, PARAMS)
        assert begun.wait(LIMIT_S)
        closed = pool.submit(engine.shutdown)
        while not engine.loop.lock._calls:
            threading.Event().wait(0.001)
        may_go_on.set()
        with pytest.raises(RuntimeError, match="this engine was shut down"):
            generated.result(LIMIT_S)
        closed.result(LIMIT_S)


def test_an_interrupt_in_another_threads_call_keeps_what_the_step_has_made(engine, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    def with_a_call(inputs):
        monkeypatch.setattr(engine.runner, "dispatch", dispatch)
        others.append(pool.submit(engine.loop.call, "other", interrupted))
        while not engine.loop.lock._calls:
            threading.Event().wait(0.001)
        return dispatch(inputs)

    dispatch, others = engine.runner.dispatch, []
    one_token = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    wanted = tokens(engine.generate([PROMPTS[0]], one_token))
    engine.add_request("a", PROMPTS[0], one_token)
    monkeypatch.setattr(engine.runner, "dispatch", with_a_call)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        with pytest.raises(RuntimeError, match=r"^other: was interrupted in the thread that computes"):
            others[0].result(LIMIT_S)
    assert engine.has_unfinished_requests()
    assert engine.get_num_unfinished_requests() == 1
    found = engine.step()
    assert [output.request_id for output in found] == ["a"]
    assert tokens(found) == wanted
    assert not engine.has_unfinished_requests()


def test_an_interrupt_while_an_output_is_made_leaves_it_to_the_next_step(engine, monkeypatch):
    engine.add_request("a", PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=1, detokenize=False))
    output_of = engine.core.outputs.output_of

    def interrupted(request):
        monkeypatch.setattr(engine.core.outputs, "output_of", output_of)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.core.outputs, "output_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert [output.finished for output in engine.step()] == [True]
    assert not engine.has_unfinished_requests()


def test_after_an_interrupted_reset_of_the_device_requests_go_on(engine, monkeypatch):
    wanted = tokens(engine.generate(PROMPTS, PARAMS))

    def interrupted():
        monkeypatch.undo()
        engine.runner.drop_state()  # So far had the reset come.
        raise KeyboardInterrupt

    def failing(inputs):
        raise ValueError("the device is gone")

    engine.add_request("a", PROMPTS[0], PARAMS)
    monkeypatch.setattr(engine.runner, "dispatch", failing)
    monkeypatch.setattr(engine.runner, "reset", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    found = [output for _ in range(9) for output in engine.step() if output.finished]
    assert tokens(found) == wanted[:1]


def test_pages_that_are_lost_with_the_last_abort_are_counted(engine, monkeypatch):
    engine.add_request("a", PROMPTS[0], PARAMS)
    engine.step()
    monkeypatch.setattr(engine.core.scheduler, "idle_fault", lambda: "3 device pages")
    engine.abort_request("a")
    assert engine.stats()["idle_faults"] == 1


def test_an_observer_that_raises_is_dropped_and_costs_no_request(engine, caplog):
    class Faulty:
        def dispatched(self, record):
            raise ValueError("no more room")

        def retired(self, record):
            raise AssertionError("told of nothing after it has raised")

    wanted = tokens(engine.generate(PROMPTS, PARAMS))
    engine.core.observer = Faulty()
    assert tokens(engine.generate(PROMPTS, PARAMS)) == wanted
    assert engine.core.observer is None
    assert "the observer of steps raised" in caplog.text


def test_a_stream_that_takes_no_deltas_is_refused_by_name(engine):
    with pytest.raises(ConfigError, match=r"^stream: got True, allowed: a function that takes"):
        list(engine.run_requests(stream=True))


def test_messages_that_were_sent_are_computed_as_prompts_are_and_their_results_can_be_sent(engine, monkeypatch, caplog):
    def sent(index):
        new = engine.builder.build(f"line-{index}", PROMPTS[index], PARAMS, number=index)
        return decode(encode(engine.checked_message(new)), NewRequest)

    def failing(inputs):
        raise ValueError("the device\nis gone")

    wanted = tokens(engine.generate(PROMPTS, PARAMS))
    found = list(engine.run_messages(sent(index) for index in range(3)))
    assert [decode(encode(last), LastOutput) for last in found] == found
    ended = {last.output.request_id: last for last in found}
    assert tokens(ended[f"line-{index}"].output for index in range(3)) == wanted
    assert {last.failure for last in found} == {""}
    assert not caplog.records
    summary = engine.summary()
    assert decode(encode(summary), EngineSummary) == summary
    monkeypatch.setattr(engine.runner, "dispatch", failing)
    failed = list(engine.run_messages(sent(index) for index in range(3)))
    assert {last.failure for last in failed} == {"the device is gone"}
    assert all("gone" not in last.output.error for last in failed), "the text is for the owner alone"
    assert sum(record.exc_info is not None for record in caplog.records) == 1


def test_a_message_that_can_never_fit_is_refused_before_it_is_computed(tiny):
    with Engine(tiny, warmup="off", **{**SIZES, "num_blocks": 10}) as engine:
        params = SamplingParams(n=4, max_tokens=60, detokenize=False)
        many = engine.builder.build("many", PROMPTS[0], params, number=0)
        with pytest.raises(InvalidRequestError, match="pages"):
            engine.checked_message(many)
