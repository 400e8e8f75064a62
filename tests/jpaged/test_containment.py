"""A fault in one request changes no other request, and no later request that gets its pages.

After loading, the embedding of one token is set to NaN: every sequence that reads this token computes NaN.
"""

import io
import json
from contextlib import redirect_stderr

import jax
import jax.numpy as jnp
import pytest

from jpaged import BeamSearchParams, Engine, SamplingParams
from jpaged.commands.generate import EXIT_SOME_FAILED, main
from jpaged.request import RequestState
from jpaged.step.runner import Runner
from jpaged.step.step_inputs import StepInputBuilder
from jpaged.step.step_outputs import StepOutputs
from jpaged.text.output_processor import OutputProcessor

from .sampling.test_sampling_fields import ASKED, PROMPTS, new_engine, tokens_of
from .tiny_model import CONFIG, SIZE_FLAGS

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
POISON = 99
"""The token whose embedding is NaN. Neighbours are kept from drawing it."""
NEIGHBOURS = {
    name: {**fields, "logit_bias": {**fields.get("logit_bias", {}), POISON: -100.0}}
    for name, fields in ASKED.items()
    if name not in ("allowed_token_ids", "extra_args", "all rules")
}
LONG = [3 + place % 90 for place in range(40)]
PLAIN = {"max_tokens": 12, "ignore_eos": True}
SICK = {
    "in its prompt": ([*LONG, POISON, 7], SamplingParams(temperature=0.0, **PLAIN)),
    "first in its prompt": ([POISON, *LONG], SamplingParams(temperature=1.0, seed=5, n=2, **PLAIN)),
    "in a prompt that is scored": ([*LONG, POISON, *LONG], SamplingParams(prompt_logprobs=2, temperature=0.0, **PLAIN)),
    "drawn": (LONG, SamplingParams(allowed_token_ids=[POISON], temperature=0.0, **PLAIN)),
    "in a search": ([POISON, *LONG], BeamSearchParams(beam_width=3, max_tokens=6)),
}


def poisoned_engine(tiny, **options) -> Engine:
    engine = new_engine(tiny, **options)
    table = (CONFIG["vocab_size"], CONFIG["hidden_size"])
    leaves = engine.runner.store.leaves
    assert [leaf.shape for leaf in leaves].count(table) == 1
    engine.runner.store.leaves = tuple(leaf.at[POISON].set(jnp.nan) if leaf.shape == table else leaf for leaf in leaves)
    return engine


@pytest.fixture(scope="module")
def engine(tiny):
    with poisoned_engine(tiny) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(engine):
    found = {}
    for name, fields in NEIGHBOURS.items():
        (output,) = engine.generate([PROMPTS[0]], SamplingParams(**fields), use_tqdm=False)
        assert output.error is None
        found[name] = tokens_of(output)
    return found


@pytest.mark.parametrize("options", [{}, {"async_scheduling": False, "num_decode_steps": 1}], ids=["ahead", "in turns"])
def test_logits_that_are_not_finite_end_their_request_alone(tiny, alone, options):
    with poisoned_engine(tiny, **options) as engine:
        prompts, params = [], []
        sick = list(SICK.values())
        for index, fields in enumerate(NEIGHBOURS.values()):
            prompts.append(PROMPTS[0])
            params.append(SamplingParams(**fields))
            if index < len(sick):
                prompts.append(sick[index][0])
                params.append(sick[index][1])
        outputs = engine.generate(prompts, params, use_tqdm=False)
        stats = engine.stats()
    failed = [output for output in outputs if output.error is not None]
    healthy = [output for output in outputs if output.error is None]
    assert len(failed) == len(SICK)
    for output in failed:
        assert "NaN or infinite" in output.error
        assert {one.finish_reason for one in output.outputs} == {"error"}
    for name, output in zip(NEIGHBOURS, healthy, strict=True):
        assert tokens_of(output) == alone[name], name
    assert stats["blocks_used"] == stats["recompiles"] == 0


@pytest.mark.parametrize("name", SICK)
def test_pages_that_hold_nan_are_found_as_no_prefix(engine, alone, name):
    """Pages before the token are good and may be shared; later ones are computed again, and fail again."""
    prompt, params = SICK[name]
    first_bad = prompt.index(POISON) if POISON in prompt else len(prompt)
    for _ in range(2):
        (output,) = engine.generate([prompt], params, use_tqdm=False)
        assert output.error is not None
        assert output.num_cached_tokens <= first_bad // 8 * 8
    # Other requests get the pages that held NaN.
    outputs = engine.generate([PROMPTS[0]] * 3, SamplingParams(**NEIGHBOURS["greedy"]), use_tqdm=False)
    assert [tokens_of(one) for one in outputs] == [alone["greedy"]] * 3


def test_one_sample_that_fails_ends_all_samples_of_its_request_that_have_not_ended(engine, alone, monkeypatch):
    check_stop = engine.core.outputs.check_stop

    def faulty(sequence, *rest):
        if sequence.request.request_id != "bad":
            return check_stop(sequence, *rest)
        if sequence.index == 1 and sequence.num_output_tokens == 5:
            raise ValueError
        return RequestState.FINISHED_STOPPED if sequence.index == 2 and sequence.num_output_tokens == 3 else None

    monkeypatch.setattr(engine.core.outputs, "check_stop", faulty)
    engine.add_request("bad", LONG, SamplingParams(temperature=1.0, seed=5, n=4, **PLAIN))
    engine.add_request("good", PROMPTS[0], SamplingParams(**NEIGHBOURS["greedy"]))
    ended = {output.request_id: output for output in engine.run_until_done()}
    assert [one.finish_reason for one in ended["bad"].outputs] == ["error", "error", "stop", "error"]
    assert all(len(one.token_ids) <= 6 for one in ended["bad"].outputs)
    assert "ValueError" in ended["bad"].error
    assert tokens_of(ended["good"]) == alone["greedy"]
    assert engine.stats()["blocks_used"] == 0


@pytest.mark.parametrize("method", ["check_stop", "output_of", "take_deltas"])
def test_an_exception_in_the_output_processor_ends_its_request_alone(engine, alone, monkeypatch, method):
    right = getattr(engine.core.outputs, method)

    def faulty(one, *rest):
        request = getattr(one, "request", one)
        if request.request_id == "bad" and request.sequences[0].num_output_tokens >= 5:
            raise ValueError("a secret of the text")
        return right(one, *rest)

    monkeypatch.setattr(engine.core.outputs, method, faulty)
    for name, fields in NEIGHBOURS.items():
        engine.add_request(name, PROMPTS[0], SamplingParams(**fields))
    engine.add_request("bad", LONG, SamplingParams(temperature=0.0, **PLAIN))
    if method == "take_deltas":
        outputs = [output for _, output in engine.run_requests(stream=lambda deltas: None)]
    else:
        outputs = []
        while engine.has_unfinished_requests():
            outputs += [output for output in engine.step() if output.finished]
    ended = {output.request_id: output for output in outputs}
    assert len(ended) == len(outputs) == len(NEIGHBOURS) + 1
    assert ended["bad"].outputs[0].finish_reason == "error"
    assert "ValueError" in ended["bad"].error
    assert "secret" not in ended["bad"].error
    for name in NEIGHBOURS:
        assert tokens_of(ended[name]) == alone[name], name
    assert engine.stats()["blocks_used"] == 0


class InjectedError(Exception):
    pass


class _Unreadable:
    """Results of a step that cannot be read."""

    def read(self):
        raise InjectedError

    read_scores = read


@pytest.mark.parametrize("is_read", [False, True], ids=["started", "read"])
@pytest.mark.parametrize("failing", [2, 9])
def test_a_step_that_fails_costs_no_tokens(engine, alone, monkeypatch, failing, is_read):
    """Rules, counts of penalties, seeds and logprobs are the same when all is computed again."""
    dispatch, count = engine.runner.dispatch, 0

    def faulty(step):
        nonlocal count
        count += 1
        if count == failing and not is_read:
            raise InjectedError
        results = dispatch(step)
        return _Unreadable() if count == failing else results

    monkeypatch.setattr(engine.runner, "dispatch", faulty)
    for name, fields in NEIGHBOURS.items():
        engine.add_request(name, PROMPTS[0], SamplingParams(**fields))
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    assert count > failing
    for name in NEIGHBOURS:
        assert tokens_of(ended[name]) == alone[name], name
        assert ended[name].error is None
    assert engine.stats()["blocks_used"] == 0
    assert not any(jax.tree.leaves(jax.tree.map(lambda leaf: leaf.is_deleted(), engine.runner.state)))


def fail_steps(monkeypatch, is_faulty):
    """Let every step fail, once it is built, whose sampled requests, a set, are such."""
    build = StepInputBuilder.build

    def faulty(self, work):
        inputs, rows = build(self, work)
        if is_faulty({sequence.request for sequence in rows.samples}):
            raise InjectedError
        return inputs, rows

    monkeypatch.setattr(StepInputBuilder, "build", faulty)


@pytest.fixture
def failing_with_bad(engine, monkeypatch):
    """Let every step fail that has a row of the request "bad"."""
    fail_steps(monkeypatch, lambda requests: any(request.request_id == "bad" for request in requests))


@pytest.mark.parametrize("place", [0, 3, len(NEIGHBOURS)])
def test_a_request_whose_steps_always_fail_ends_with_an_error_and_the_others_go_on(
    engine, alone, failing_with_bad, place
):
    """The failing request comes first, in the middle or last, and some requests still wait."""
    more = [f"another greedy {number}" for number in range(16)]
    asked = {**NEIGHBOURS, **dict.fromkeys(more, NEIGHBOURS["greedy"])}
    wanted = {**alone, **dict.fromkeys(more, alone["greedy"])}
    names = list(asked)
    names.insert(place, "bad")
    for name in names:
        engine.add_request(name, PROMPTS[0], SamplingParams(**asked.get(name, PLAIN)))
    assert len(names) > engine.step_sizes.max_num_seqs
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    assert ended["bad"].outputs[0].finish_reason == "error"
    assert "InjectedError" in ended["bad"].error
    for name in asked:
        assert (ended[name].error, tokens_of(ended[name])) == (None, wanted[name]), name
    assert engine.stats()["blocks_used"] == 0
    assert engine.scheduler.isolated_request is None


def test_where_only_steps_of_several_requests_fail_all_end_one_by_one(engine, alone, monkeypatch):
    """Each request gets tokens while it is computed alone, as where memory is short."""
    fail_steps(monkeypatch, lambda requests: len(requests) > 1)
    names = list(NEIGHBOURS)[:3]
    params = [SamplingParams(**NEIGHBOURS[name]) for name in names]
    outputs = engine.generate([PROMPTS[0]] * 3, params, use_tqdm=False)
    assert [tokens_of(output) for output in outputs] == [alone[name] for name in names]


FAULTS = ("dispatch", "read", "check_stop", "output_of")
CALLS = {
    "generate": lambda engine, **options: engine.generate([PROMPTS[0]] * 2, SamplingParams(**PLAIN), **options),
    "chat": lambda engine, **options: engine.chat([{"role": "user", "content": "x"}], **options),
    "beams": lambda engine, **options: engine.beam_search(
        [PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=4), **options
    ),
    "arrays": lambda engine, **options: engine.generate(
        [PROMPTS[0]], SamplingParams(max_tokens=4), return_arrays=True, **options
    ),
    "logprobs": lambda engine: engine.logprobs([5, 6, 7]),
    "compare_logprobs": lambda engine: engine.compare_logprobs(None, [PROMPTS[0]], SamplingParams(max_tokens=4)),
}


@pytest.fixture
def breaking(engine, monkeypatch):
    """Return a function that lets one stage of every request fail from its call on."""

    def break_stage(fault):
        def failing(*args, **kwargs):
            raise InjectedError(f"{fault} is broken")

        if fault == "dispatch":
            monkeypatch.setattr(engine.runner, "dispatch", failing)
        elif fault == "read":
            monkeypatch.setattr(StepOutputs, "read", failing)
            monkeypatch.setattr(StepOutputs, "read_scores", failing)
        else:
            monkeypatch.setattr(engine.core.outputs, fault, failing)

    return break_stage


FAILING_CALLS = [
    (fault, call) for fault in FAULTS for call in CALLS if not (fault == "check_stop" and call in ("beams", "logprobs"))
]
"""The host looks for stops neither in a search nor in given tokens."""


@pytest.mark.parametrize(("fault", "call"), FAILING_CALLS)
def test_what_fails_is_raised_with_its_message_and_logged_without_a_traceback(engine, breaking, caplog, fault, call):
    breaking(fault)
    with pytest.raises(InjectedError, match=f"{fault} is broken"):
        CALLS[call](engine)
    assert not engine.has_unfinished_requests()
    assert [record for record in caplog.records if record.exc_info] == []
    assert len(caplog.records) <= 1


@pytest.mark.parametrize(("fault", "call"), [pair for pair in FAILING_CALLS if "logprobs" not in pair[1]])
def test_what_fails_and_is_returned_is_logged_with_one_traceback(engine, breaking, caplog, fault, call):
    breaking(fault)
    outputs = CALLS[call](engine, on_error="return")
    for error in outputs.errors if call == "arrays" else [output.error for output in outputs]:
        assert error.endswith(": InjectedError")  # Without the message: it may hold what belongs to others.
    (logged,) = [record for record in caplog.records if record.exc_info]
    assert f"{fault} is broken" in logged.getMessage()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_command_says_what_has_failed_in_a_line_each_with_one_traceback(tiny, tmp_path, monkeypatch, caplog, fault):
    def failing(*args, **kwargs):
        raise InjectedError(f"{fault} is broken")

    owner = {"dispatch": Runner, "read": StepOutputs}.get(fault, OutputProcessor)
    monkeypatch.setattr(owner, fault, failing)
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text('{"prompt": "a", "max_tokens": 3}\n' * 3)
    flags = ["-m", tiny, *SIZE_FLAGS, "--no-chat", "--prompt-file", str(prompts), "-o", str(results)]
    with redirect_stderr(io.StringIO()) as stderr:
        assert main(flags) == EXIT_SOME_FAILED
    errors = [json.loads(line)["error"] for line in results.read_text().splitlines()]
    assert [error["message"].endswith(f": InjectedError: {fault} is broken") for error in errors] == [True] * 3
    assert [error["type"] for error in errors] == ["EngineError"] * 3
    said = [line for line in stderr.getvalue().splitlines() if line.startswith("error: ")]
    assert said == [f"error: {number}: {error['message']}" for number, error in enumerate(errors, 1)]
    assert len([record for record in caplog.records if record.exc_info]) == 1


def _step_until_it_raises(engine, outputs):
    while engine.has_unfinished_requests():
        outputs += engine.step()


def test_steps_that_always_fail_end_all_unfinished_requests_and_no_later_ones(engine, alone, monkeypatch):
    def broken(step):
        raise InjectedError("again")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "dispatch", broken)
        with pytest.raises(InjectedError, match="again"):
            engine.generate([PROMPTS[0]] * 3, SamplingParams(**PLAIN), use_tqdm=False)
        for name in "abcd":
            engine.add_request(name, PROMPTS[0], SamplingParams(**PLAIN))
        ended = []
        with pytest.raises(InjectedError):
            _step_until_it_raises(engine, ended)
    ended += engine.step()
    assert sorted(output.request_id for output in ended) == list("abcd")
    for output in ended:
        assert (output.finished, output.outputs[0].finish_reason) == (True, "error")
        assert "InjectedError" in output.error
    assert not engine.has_unfinished_requests()
    (output,) = engine.generate([PROMPTS[0]], SamplingParams(**NEIGHBOURS["greedy"]), use_tqdm=False)
    assert tokens_of(output) == alone["greedy"]


@pytest.mark.parametrize("failing", [{"2"}, {"1", "2", "3", "4", "5"}], ids=["one line", "all of them"])
def test_each_line_of_a_file_has_its_result_or_its_error(tiny, tmp_path, monkeypatch, failing):
    fail_steps(monkeypatch, lambda requests: any(request.request_id in failing for request in requests))
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text('{"prompt": "a", "max_tokens": 3}\n' * 5)
    flags = ["-m", tiny, *SIZE_FLAGS, "--no-chat", "--prompt-file", str(prompts), "-o", str(results)]
    assert main(flags) == EXIT_SOME_FAILED
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert {str(number) for number, line in enumerate(lines, 1) if "error" in line} == failing
    assert len(lines) == 5
