"""Scheduling options, priorities, limits, forks, pins and interrupts of `Engine`, on a tiny random model."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from jpaged import (
    BeamSearchParams,
    Engine,
    InvalidRequestError,
    QueueFullError,
    RequestOutput,
    SamplingParams,
)
from jpaged.request import Request

from .tiny_model import SIZES

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.5, max_tokens=40, ignore_eos=True, seed=5)
PROMPTS = [[10 + 3 * index + i % 40 for i in range(10 + 7 * index)] for index in range(6)]
POOL = {"num_blocks": 25}
ONE_BY_ONE: dict[str, Any] = {**SIZES, "num_decode_steps": 1}


def samples(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


def finished_in_order(engine: Engine) -> list[str]:
    return [output.request_id for output in engine.run_until_done()]


def test_a_request_that_can_never_fit_is_refused_at_once_while_others_go_on(tiny: str) -> None:
    with Engine(tiny, **SIZES | POOL) as engine:
        wanted = samples(engine.generate([PROMPTS[0]], GREEDY, use_tqdm=False))
        engine.add_request("a", PROMPTS[0], GREEDY)
        engine.step()
        with pytest.raises(InvalidRequestError, match=r"which take \d+ pages, allowed: 24 pages") as caught:
            engine.add_request("b", PROMPTS[1], replace(SAMPLED, n=4, max_tokens=100))
        assert caught.value.param == "prompt"
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        with pytest.raises(InvalidRequestError, match=r"^messages: got \d+ tokens and up to 100 more") as caught:
            engine.add_request("b", chat, replace(SAMPLED, n=4, max_tokens=100))
        assert caught.value.param == "messages"
        with pytest.raises(InvalidRequestError, match="max_num_seqs, 8") as caught:
            engine.add_request("c", PROMPTS[1], replace(SAMPLED, n=9))
        assert caught.value.param == "n"
        (output,) = list(engine.run_until_done())
        assert samples([output]) == wanted
        before = engine.stats()["steps"]
        with pytest.raises(InvalidRequestError, match="prompt 1: "):
            engine.generate(PROMPTS[:2], [GREEDY, replace(SAMPLED, n=4, max_tokens=100)], use_tqdm=False)
        assert engine.stats()["steps"] == before, "nothing was computed"


def test_a_full_queue_takes_no_more_and_loses_nothing(tiny: str) -> None:
    with Engine(tiny, **SIZES, limits={"waiting_tokens": 45}) as engine:
        for index in range(2):
            engine.add_request(str(index), PROMPTS[index], GREEDY)
        with pytest.raises(QueueFullError, match=r"waiting_tokens: got .* allowed: .*try again later"):
            engine.add_request("2", PROMPTS[2], GREEDY)
        engine.step()
        engine.add_request("2", PROMPTS[2], GREEDY)
        outputs = {output.request_id: output for output in engine.run_until_done()}
        assert sorted(outputs) == ["0", "1", "2"]
        # A whole list is more than may wait: it is queued as there is room.
        whole = engine.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
        assert samples(whole) == samples([outputs[str(index)] for index in range(3)])


def test_lower_priorities_run_first_and_equal_ones_in_order_of_arrival(tiny: str) -> None:
    with Engine(tiny, **SIZES | {"max_num_seqs": 1}, scheduling_policy="priority") as engine:
        for name, priority in [("a", 3), ("b", None), ("c", -2), ("d", 3), ("e", 0)]:
            engine.add_request(name, PROMPTS[0], GREEDY, priority=priority)
        engine.add_request("f", {"prompt_token_ids": PROMPTS[0], "priority": -1}, GREEDY)
        assert finished_in_order(engine) == ["c", "f", "b", "e", "a", "d"]
        firsts = engine.generate(PROMPTS[:3], GREEDY, priority=[5, 4, -1], use_tqdm=False)
        times = [output.metrics.first_token_time for output in firsts]
        assert sorted(range(3), key=lambda index: times[index] or 0) == [2, 1, 0]
        with pytest.raises(InvalidRequestError, match="priority: got 2 for 3 prompts"):
            engine.generate(PROMPTS[:3], GREEDY, priority=[1, 2], use_tqdm=False)


def test_a_policy_may_be_a_key_function_of_the_caller(tiny: str) -> None:
    with Engine(tiny, **SIZES | {"max_num_seqs": 1}, scheduling_policy=lambda request: -request.prompt_len) as engine:
        for index in (1, 0, 2):
            engine.add_request(str(index), PROMPTS[index], GREEDY)
        assert finished_in_order(engine) == ["2", "1", "0"]


def test_requests_with_different_cache_salts_share_no_page(tiny: str) -> None:
    with Engine(tiny, **SIZES) as engine:

        def cached(salt: str | None) -> int:
            prompt = {"prompt_token_ids": PROMPTS[4], **({"cache_salt": salt} if salt else {})}
            return engine.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens

        assert [cached(salt) for salt in (None, "a", "b")] == [0, 0, 0]
        assert {cached(salt) for salt in (None, "a", "b")} == {(len(PROMPTS[4]) - 1) // 8 * 8}
        assert engine.pin_prefix({"prompt_token_ids": PROMPTS[4]}, cache_salt="a") == len(PROMPTS[4]) // 8 * 8
        with pytest.raises(InvalidRequestError, match="not pinned"):
            engine.unpin_prefix(PROMPTS[4])
        engine.unpin_prefix(PROMPTS[4], cache_salt="a")


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_lost_device_state_costs_forks_and_swapped_requests_no_token(tiny: str, mode: str) -> None:
    params = replace(SAMPLED, n=2)
    options = POOL | {"num_host_blocks": 101, "preemption_mode": mode}
    with Engine(tiny, **SIZES) as roomy:
        wanted = samples(roomy.generate(PROMPTS, params, use_tqdm=False))
    with Engine(tiny, **SIZES | options) as engine:
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(str(index), prompt, params, number=index)
        num_losses, final = 0, {}
        while engine.has_unfinished_requests():
            if num_losses < 3 and engine.stats()[f"preemptions_{mode}"] > num_losses:
                num_losses += 1
                engine.runner.state.cache.pages[0].delete()
            final.update({output.request_id: output for output in engine.step()})
        assert num_losses == 3
        assert samples([final[str(index)] for index in range(len(PROMPTS))]) == wanted
        stats = engine.stats()
        assert (stats["blocks_used"], stats["host_blocks_used"], stats["recompiles"]) == (0, 0, 0)


def test_an_end_whose_output_an_interrupt_prevented_comes_with_the_next_step(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tiny, **ONE_BY_ONE) as engine:
        params = [replace(GREEDY, max_tokens=3), replace(GREEDY, max_tokens=6)]
        wanted = samples(engine.generate(PROMPTS[:2], params, use_tqdm=False))
        for index in range(2):
            engine.add_request(str(index), PROMPTS[index], params[index])
        finish = type(engine.scheduler).finish

        def interrupted(*args: Any) -> None:
            finish(engine.scheduler, *args)
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(engine.scheduler, "finish", interrupted)
        final: dict[str, RequestOutput] = {}
        engine.step()
        engine.step()
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        for _ in range(20):
            final.update({output.request_id: output for output in engine.step()})
        assert not engine.has_unfinished_requests()
        assert samples([final[str(index)] for index in range(2)]) == wanted


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("max_tokens", [8, 30])
def test_an_interrupt_amid_a_token_loses_no_token_and_repeats_none(
    tiny: str, monkeypatch: pytest.MonkeyPatch, when: str, max_tokens: int
) -> None:
    """The interrupt comes amid the eighth token: the last one, or one of 30. Text and logprobs are unchanged too."""
    params = SamplingParams(temperature=1.5, max_tokens=max_tokens, ignore_eos=True, seed=5, logprobs=2)
    with Engine(tiny, **ONE_BY_ONE) as engine:
        (wanted,) = engine.generate([PROMPTS[0]], params, use_tqdm=False)
        engine.add_request("a", PROMPTS[0], params)
        check_stop = engine.core.outputs.check_stop

        def interrupted(sequence: Any, *args: Any) -> Any:
            is_eighth = len(sequence.token_ids) - len(PROMPTS[0]) == 8
            if is_eighth and when == "before":
                monkeypatch.undo()
                raise KeyboardInterrupt
            end = check_stop(sequence, *args)
            if is_eighth:
                monkeypatch.undo()
                raise KeyboardInterrupt
            return end

        monkeypatch.setattr(engine.core.outputs, "check_stop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(iter(engine.step, None))
        (output,) = list(engine.run_until_done())
        (got, solo) = (output.outputs[0], wanted.outputs[0])
        assert (got.token_ids, got.text, got.finish_reason) == (solo.token_ids, solo.text, "length")
        assert got.cumulative_logprob == pytest.approx(solo.cumulative_logprob)
        assert len(got.logprobs or ()) == max_tokens
        assert engine.stats()["blocks_used"] == 0


def test_an_ended_request_whose_output_was_lost_can_be_aborted(tiny: str) -> None:
    with Engine(tiny, **SIZES) as engine:
        for name in ("a", "b"):
            engine.add_request(name, PROMPTS[0], replace(GREEDY, max_tokens=1 if name == "a" else 20))
        engine.core.dispatch()
        engine.core.retire()
        engine.scheduler.ended.clear()
        engine.abort_request(["a", "b"])
        assert engine.get_num_unfinished_requests() == engine.stats()["blocks_used"] == 0


def test_an_id_may_be_used_again_once_its_request_is_aborted(tiny: str) -> None:
    with Engine(tiny, **SIZES) as engine:
        wanted = samples(engine.generate([PROMPTS[1]], GREEDY, use_tqdm=False))
        engine.add_request("a", PROMPTS[0], GREEDY)
        engine.step()
        engine.abort_request("a")
        engine.add_request("a", PROMPTS[1], GREEDY)
        outputs = engine.step()
        assert [(output.prompt_token_ids, output.finished) for output in outputs] == [(tuple(PROMPTS[1]), False)]
        assert samples(list(engine.run_until_done())) == wanted
        assert not engine.scheduler.has_unfinished
        assert engine.stats()["blocks_used"] == 0


def test_a_policy_key_that_fails_for_one_prompt_of_a_list_is_refused_before_any_step(tiny: str) -> None:
    def key(request: Request) -> int:
        return 1 // (20 // request.prompt_len)

    with Engine(tiny, **SIZES, scheduling_policy=key, limits={"waiting_requests": 1}) as engine:
        with pytest.raises(InvalidRequestError, match=r"prompt 2: scheduling_policy: .*ZeroDivisionError"):
            engine.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
        assert engine.stats()["steps"] == 0
        outputs = engine.generate(PROMPTS[:4], GREEDY, use_tqdm=False, on_error="return")
        assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 2 + ["error"] * 2


def test_prompts_that_a_full_queue_holds_back_follow_in_the_order_of_the_policy(tiny: str) -> None:
    options: dict[str, Any] = {"scheduling_policy": "priority", "limits": {"waiting_requests": 1}}
    with Engine(tiny, **SIZES | {"max_num_seqs": 1}, **options) as engine:
        outputs = engine.generate(PROMPTS[:4], GREEDY, priority=[5, 5, 4, 0], use_tqdm=False)
        times = [output.metrics.first_token_time for output in outputs]
        assert sorted(range(4), key=lambda index: times[index] or 0) == [3, 2, 0, 1]


def test_an_arrival_time_that_is_not_in_the_past_is_refused(tiny: str) -> None:
    wrong: list[Any] = [float("nan"), float("inf"), True, "now", 10**400, 10.0**12]
    with Engine(tiny, **SIZES) as engine:
        for when in wrong:
            with pytest.raises(InvalidRequestError, match=r"arrival_time: .*time\.monotonic\(\)"):
                engine.add_request("a", PROMPTS[0], GREEDY, arrival_time=when)
        engine.add_request("a", PROMPTS[0], GREEDY, arrival_time=0)
        engine.abort_request("a")


def test_bad_calls_about_running_requests_name_what_is_wrong(tiny: str) -> None:
    with Engine(tiny, **SIZES) as engine:
        engine.add_request("a", PROMPTS[0], SAMPLED)
        engine.add_request("greedy", PROMPTS[0], GREEDY)
        for call, param in [
            (lambda: engine.fork("a", sample_indices=3), "sample_indices"),  # type: ignore[arg-type]
            (lambda: engine.fork("greedy"), "temperature"),
            (lambda: engine.fork("unknown"), "request_id"),
            (lambda: engine.fork("a", sample=3), "sample"),
            (lambda: engine.fork("a", 2, sample_indices=[1]), "sample_indices"),
            (lambda: engine.fork("a", 1, sample_indices=[0]), "sample_indices"),
            (lambda: engine.fork("a", 1, sample_indices=[-1]), "sample_indices"),
            (lambda: engine.fork("a", 8), "n"),
            (lambda: engine.fork("a", 10**30), "n"),
            (lambda: engine.fork("a", 0), "n"),
            (lambda: engine.add_request("b", PROMPTS[0], SAMPLED, number="zz"), "number"),  # type: ignore[arg-type]
            (lambda: engine.add_request("b", PROMPTS[0], SAMPLED, number=-1), "number"),
            (lambda: engine.fork(7), "request_id"),  # type: ignore[arg-type]
            *(
                (partial(engine.fork, "a", num_output_tokens=wrong), "num_output_tokens")
                for wrong in (1, -1, True, "0")
            ),
            *(
                (partial(engine.fork, "a", first_token_ids=wrong), "first_token_ids")
                for wrong in ([258], [-1], [2**70])
            ),
            *(
                (partial(engine.fork, "a", 1, first_token_ids=wrong), "first_token_ids")
                for wrong in ([], [1, 2], 5, "a")
            ),
            (lambda: engine.abort_request([["a"]]), "request_ids"),  # type: ignore[list-item]
            (lambda: engine.abort_request(5), "request_ids"),  # type: ignore[arg-type]
        ]:
            with pytest.raises(InvalidRequestError) as caught:
                call()
            assert caught.value.param == param
        assert engine.get_num_unfinished_requests() == 2


BAD_FORKS: list[tuple[str, dict[str, Any], str]] = [
    ("a", {"num_output_tokens": 3}, "num_output_tokens: got 3, allowed: an integer in [0, 2], the output tokens that "),
    ("a", {"num_output_tokens": -1}, "num_output_tokens: got -1"),
    ("a", {"num_output_tokens": True}, "num_output_tokens: got True"),
    ("a", {"sample": False}, "sample: got False, allowed: a sample that has not ended, [0]"),
    ("a", {"sample": np.array([0, 0])}, "sample: got array([0, 0])"),
    ("a", {"first_token_ids": [258]}, "first_token_ids: got token id 258, out of vocabulary, allowed: 0 to 257"),
    ("a", {"first_token_ids": [5, -1]}, "first_token_ids: got token id -1, out of vocabulary"),
    ("a", {"first_token_ids": [2**70]}, "first_token_ids: got token id 1180591620717411303424, out of vocabulary"),
    ("a", {"first_token_ids": [0.5]}, "first_token_ids: got token id 0.5"),
    ("a", {"first_token_ids": []}, "n: got 0"),
    ("a", {"first_token_ids": 5}, "first_token_ids: got 5, allowed: a list of n, 1, token ids"),
    ("a", {"n": 1, "first_token_ids": [1, 2]}, "first_token_ids: got [1, 2], allowed: a list of n, 1, token ids"),
    ("greedy", {"num_output_tokens": 1}, "temperature: got a greedy request, whose samples would all be equal"),
    ("ruled", {"first_token_ids": [8]}, "first_token_ids: got token id 8, which completes one of bad_words"),
    ("ruled", {"first_token_ids": [9]}, "first_token_ids: got token id 9, which is not among allowed_token_ids"),
    (
        "ruled",
        {"first_token_ids": [0]},
        "first_token_ids: got token id 0, which would end a sample before min_",
    ),
]
BAD_SAMPLES: list[Any] = [1, -1, True, "0", 0.5, [0], np.array([0, 0])]


def test_bad_forks_and_samples_to_abort_are_refused_in_one_line_and_change_no_request(tiny: str) -> None:
    with Engine(tiny, **ONE_BY_ONE) as engine:
        rules: dict[str, Any] = {"allowed_token_ids": [0, 7, 8], "bad_words": [engine.tokenizer.decode([8])]}
        short = replace(SAMPLED, max_tokens=9)
        params = {"a": short, "greedy": replace(GREEDY, max_tokens=9), "ruled": replace(short, min_tokens=9, **rules)}
        wanted = samples(engine.generate([PROMPTS[0]] * 3, list(params.values()), use_tqdm=False))
        for request_id, one in params.items():
            engine.add_request(request_id, PROMPTS[0], one)
        while len(engine.requests["ruled"].sequences[0].token_ids) < len(PROMPTS[0]) + 2:
            engine.step()
        for request_id, options, words in BAD_FORKS:
            with pytest.raises(InvalidRequestError, match=f"^{re.escape(words)}[^\n]*$"):
                engine.fork(request_id, **options)
        for sample in BAD_SAMPLES:
            with pytest.raises(
                InvalidRequestError, match=r"^sample: got .*, allowed: one of the request's samples, \[0\];"
            ):
                engine.abort_request("a", sample=sample)
        with pytest.raises(InvalidRequestError, match=r"^request_ids: got 2 ids beside sample, allowed: one id;"):
            engine.abort_request(["a", "greedy"], sample=0)
        engine.abort_request("unknown", sample=2)  # As without a sample: the request may have ended.
        outputs = {output.request_id: output for output in engine.run_until_done()}
        assert samples([outputs[request_id] for request_id in params]) == wanted


def test_given_tokens_count_as_drawn_and_the_last_sample_that_is_pruned_ends_the_request(tiny: str) -> None:
    params = replace(SAMPLED, ignore_eos=False, stop=["zz"], output_kind="delta", min_tokens=2)
    with Engine(tiny, **ONE_BY_ONE) as engine:
        (letter,) = engine.tokenizer.encode("z")
        engine.add_request("a", PROMPTS[0], params)
        while len(engine.requests["a"].sequences[0].token_ids) < len(PROMPTS[0]) + 3:
            engine.step()
        assert engine.fork("a", num_output_tokens=2, first_token_ids=np.array([0, letter])) == [1, 2]
        deltas = [one for _ in range(4) for output in engine.step() for one in output.outputs]
        assert [(one.finish_reason, one.text) for one in deltas if one.index == 1][-1] == ("stop", "")
        engine.fork("a", sample=2, num_output_tokens=3, first_token_ids=[letter])
        engine.abort_request("a", sample=0)
        assert engine.loop.inbox.has_changed, "the next step tells of it, whatever it computes"
        engine.abort_request("a", sample=2)
        deltas += [one for output in engine.run_until_done() for one in output.outputs]
        ends = {one.index: (one.finish_reason, one.stop_reason) for one in deltas if one.finish_reason}
        assert ends == {0: ("abort", None), 1: ("stop", None), 2: ("abort", None), 3: ("stop", "zz")}
        drawn = [token for one in deltas if one.index == 3 for token in one.token_ids]
        assert drawn[2:] == [letter, letter]
        assert engine.stats()["blocks_used"] == 0
        engine.add_request("b", PROMPTS[0], params)
        engine.step()
        engine.abort_request("b", sample=0)
        (last,) = engine.step()
        assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
        assert not engine.requests


def test_stats_count_requests_by_state_and_no_dropped_token(tiny: str) -> None:
    with Engine(tiny, **SIZES | {"max_num_seqs": 1}, enable_prefix_caching=False) as engine:
        for index in range(3):
            engine.add_request(str(index), PROMPTS[index], GREEDY)
        engine.step()
        stats = engine.stats()
        assert [stats[f"requests_{state}"] for state in ("running", "waiting", "swapped")] == [1, 2, 0]
        list(engine.run_until_done())
        assert engine.stats()["generation_tokens"] == 60
        assert engine.stats()["prefix_cache_queries"] == 0


def test_generate_chat_and_beam_search_take_priorities_and_return_errors(tiny: str) -> None:
    search = BeamSearchParams(beam_width=1, max_tokens=3)
    chats = [[{"role": "user", "content": text}] for text in "abc"]
    options: dict[str, Any] = {"use_tqdm": False, "priority": [np.int64(5), -5, 0], "on_error": "return"}
    with Engine(tiny, **SIZES | {"max_num_seqs": 1}, scheduling_policy="priority") as engine:
        for outputs in (
            engine.generate(["a", "b", ""], GREEDY, **options),
            engine.chat([chats[0], chats[1], []], GREEDY, **options),
            engine.beam_search(["a", "b", ""], search, **options),
        ):
            assert [output.error is None for output in outputs] == [True, True, False]
            assert outputs[1].metrics.first_scheduled_time <= outputs[0].metrics.first_scheduled_time
        assert len(engine.generate(["a", "b"], GREEDY, use_tqdm=False, priority=np.int64(3))) == 2
        with pytest.raises(InvalidRequestError, match="prompt 2"):
            engine.chat([*chats[:2], []], GREEDY, use_tqdm=False)


def test_a_priority_under_fcfs_is_refused_with_the_index_of_its_prompt(tiny: str) -> None:
    with Engine(tiny, **SIZES) as engine:
        with pytest.raises(InvalidRequestError, match="prompt 1: priority: got 3 ") as caught:
            engine.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[0, 3])
        assert caught.value.param == "priority"
        with pytest.raises(InvalidRequestError, match=r"prompt 0: priority: got 7 .*fcfs"):
            engine.generate({"prompt": "a", "priority": 7}, GREEDY, use_tqdm=False)
        assert len(engine.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[0, 0])) == 2


def test_calls_of_other_threads_run_between_steps_and_change_no_token(tiny: str) -> None:
    """Threads add, fork, abort and pin while one steps; each request draws what it draws alone."""
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True, detokenize=False)
    prompts = {f"{thread}-{number}": [7 + thread, 9 + number] * 8 for thread in range(3) for number in range(4)}
    with Engine(tiny, **SIZES) as engine:
        wanted = {name: engine.generate([prompt], params)[0].outputs[0].token_ids for name, prompt in prompts.items()}
        faults: list[BaseException] = []

        def add(thread: int) -> None:
            try:
                for number in range(4):
                    engine.add_request(f"{thread}-{number}", prompts[f"{thread}-{number}"], params)
                    engine.add_request(f"gone-{thread}-{number}", [3, 4, 5], params)
                    engine.pin_prefix([11] * 8)
                    engine.abort_request(f"gone-{thread}-{number}")
                    engine.unpin_prefix([11] * 8)
            except BaseException as fault:
                faults.append(fault)

        engine.add_request("first", [5] * 9, replace(params, max_tokens=100))
        threads = [threading.Thread(target=add, args=(thread,)) for thread in range(3)]
        for thread in threads:
            thread.start()
        found = {}
        while engine.has_unfinished_requests() or any(thread.is_alive() for thread in threads):
            found |= {output.request_id: output for output in engine.step() if output.finished}
        for thread in threads:
            thread.join()
        assert faults == []
        assert {name: found[name].outputs[0].token_ids for name in prompts} == wanted
        assert found.keys() == {"first", *prompts}
        assert engine.stats()["blocks_used"] == 0


def test_a_call_of_another_thread_raises_its_own_error_and_waits_for_the_end_of_a_step(tiny: str) -> None:
    with Engine(tiny, **SIZES) as engine:
        inside, go_on = threading.Event(), threading.Event()
        dispatch = engine.runner.dispatch

        def slow(inputs: Any) -> Any:
            inside.set()
            assert go_on.wait(60)
            return dispatch(inputs)

        engine.runner.dispatch = slow  # type: ignore[method-assign]
        engine.add_request("a", [5, 6], SamplingParams(max_tokens=2, detokenize=False))
        stepping = threading.Thread(target=engine.step)
        stepping.start()
        assert inside.wait(60)
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(engine.add_request, "a", [5, 6], SamplingParams(max_tokens=2, detokenize=False))
            other = pool.submit(engine.fork, "nobody")
            with pytest.raises(InvalidRequestError, match=r"^request_id: got 'a', which is in use"):
                again.result(60)  # Refused at once: nothing changes.
            assert not other.done()
            go_on.set()
            with pytest.raises(InvalidRequestError, match=r"^request_id: got 'nobody'"):
                other.result(60)
        stepping.join()


def test_calls_of_several_threads_are_computed_in_the_same_steps(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = replace(SAMPLED, seed=7)
    with Engine(tiny, **SIZES) as engine:
        wanted, other_wanted = samples(engine.generate(PROMPTS, alone)), samples(engine.generate([[5, 6]], alone))
        scores_wanted = engine.logprobs([5, 6, 7])
        inside, go_on = threading.Event(), threading.Event()
        dispatch = engine.runner.dispatch

        def slow(inputs: Any) -> Any:
            inside.set()
            assert go_on.wait(60)
            return dispatch(inputs)

        monkeypatch.setattr(engine.runner, "dispatch", slow)
        with ThreadPoolExecutor(4) as pool:
            generated = pool.submit(engine.generate, PROMPTS, alone)
            assert inside.wait(60)
            other = pool.submit(engine.generate, [[5, 6]], alone)
            scores = pool.submit(engine.logprobs, [5, 6, 7])
            added = pool.submit(engine.add_request, "a", [5, 6], alone)
            go_on.set()
            added.result(60)
            assert samples(generated.result(60)) == wanted
            assert samples(other.result(60)) == other_wanted
            assert np.array_equal(scores.result(60), scores_wanted)
        assert samples([*engine.run_until_done()]) == other_wanted
        assert not engine.requests
