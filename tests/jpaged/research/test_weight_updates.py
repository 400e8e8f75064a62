"""New weights in a running engine: what each request draws, by which weights, and what later requests may find.

The reference is a fresh engine that started with the new weights.
"""

import re
from dataclasses import replace
from itertools import count
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jpaged import BeamSearchParams, ConfigError, Engine, ModelLoadError, SamplingParams
from jpaged.text.prompt_params import CheckedParams

from ..tiny_model import CONFIG, SIZES, reference_logits, write_tiny_model
from .trainer_requests import IDS, NEW, OLD, PARAMS, PROMPTS, begin, step, tokens

README = Path(__file__).parents[3] / "README.md"
NEWCOMERS = ["newcomer 0", "newcomer 1"]
pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")


@pytest.fixture
def engine(tiny):
    with Engine(tiny, **SIZES, num_decode_steps=4) as engine:
        yield engine


def add_newcomers(engine):
    """Queue requests that no step has begun."""
    for request_id, prompt in zip(NEWCOMERS, PROMPTS, strict=False):
        engine.add_request(request_id, prompt, PARAMS)


def spans(sample):
    return [(one.version, one.start, one.end) for one in sample.weight_versions]


def forced_logprobs(weights_seed, prompt, output):
    """Return the logprob of each output token by the model with these weights, in float64."""
    ids = [*prompt, *output]
    logits = reference_logits(ids, weights_seed)[len(prompt) - 1 : -1]
    logits -= logits.max(axis=1, keepdims=True)
    return logits[np.arange(len(output)), output] - np.log(np.exp(logits).sum(axis=1))


def test_requests_after_an_update_draw_as_in_a_fresh_engine_and_find_no_older_prefixes(engine, drawn):
    assert tokens(engine.generate(PROMPTS, PARAMS)) == drawn["old"]
    for version, tree in ((1, NEW), (2, OLD), (7, NEW)):
        engine.update_params(tree, version=version)
        hits = engine.stats()["prefix_cache_hits"]
        outputs = engine.generate(PROMPTS, PARAMS)
        assert tokens(outputs) == drawn["old" if tree is OLD else "new"]
        assert engine.stats()["prefix_cache_hits"] == hits, "pages of other weights"
        assert [spans(output.outputs[0]) for output in outputs] == [[(version, 0, 24)]] * len(PROMPTS)
    assert tokens(engine.generate(PROMPTS, PARAMS)) == drawn["new"]
    assert engine.stats()["prefix_cache_hits"] > hits, "pages of the present weights are found"
    assert engine.weights_version == 7


def test_the_lines_of_the_readme_run_as_they_are_written(tiny, drawn):
    (lines,) = re.findall(r"## Beside a trainer\n\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    with Engine(tiny, **{**SIZES, "max_num_seqs": 8}) as engine:
        ids = [prompt[:8] for prompt in PROMPTS]
        exec(lines, {"engine": engine, "params": NEW, "ids": ids, "SamplingParams": SamplingParams})
        assert tokens(engine.generate(PROMPTS, PARAMS)) == drawn["new"]


@pytest.mark.parametrize("in_flight", ["wait", "keep", "recompute", "abort"])
def test_what_becomes_of_requests_in_flight(engine, drawn, in_flight):
    """wait: all by the old weights. abort: an end. keep and recompute: later tokens by the new weights, and logprobs of
    recomputed requests are those of a model that knew nothing but the new weights and the tokens."""
    begin(engine)
    engine.update_params(NEW, in_flight=in_flight)
    found = step(engine)
    assert found.keys() == set(IDS)
    for index, request_id in enumerate(IDS):
        sample = found[request_id].outputs[0]
        num_old = sample.weight_versions[0].end
        assert num_old > 0
        assert sample.token_ids[:num_old] == drawn["old"][index][:num_old]
        assert sample.finish_reason == ("abort" if in_flight == "abort" else "length")
        if in_flight == "wait":
            assert spans(sample) == [(0, 0, 24)]
        elif in_flight == "abort":
            assert spans(sample) == [(0, 0, num_old)]
            assert len(sample.token_ids) == num_old < 24
        else:
            assert spans(sample) == [(0, 0, num_old), (1, num_old, 24)]
            assert found[request_id].metrics.num_preemptions == (in_flight == "recompute")
        if in_flight == "recompute":
            wanted = forced_logprobs(1, PROMPTS[index], sample.token_ids)[num_old:]
            got = [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
            assert np.abs(np.array(got[num_old:]) - wanted).max() < 1e-4
    assert tokens(engine.generate(PROMPTS, PARAMS)) == drawn["new"]
    assert engine.stats()["recompiles"] == 0


def test_kept_requests_go_on_as_if_nothing_had_been_if_the_weights_are_the_same(engine, drawn):
    found = begin(engine)
    for _ in range(3):
        engine.update_params(OLD, in_flight="keep")
        found |= step(engine, 1)
    found |= step(engine)
    assert [found[request_id].outputs[0].token_ids for request_id in IDS] == drawn["old"]
    versions = [span.version for span in found[IDS[0]].outputs[0].weight_versions]
    assert versions == sorted(set(versions))
    assert len(versions) > 1


@pytest.mark.slow
def test_while_running_requests_are_waited_for_those_that_wait_are_not_begun(tiny, drawn):
    with Engine(tiny, **{**SIZES, "max_num_seqs": 2}) as engine:
        begin(engine, 2)
        begun = [request.request_id for request in engine.scheduler.running]
        assert len(begun) == 2
        engine.update_params(NEW, in_flight="wait")
        found = step(engine)
    for index, request_id in enumerate(IDS):
        is_old = request_id in begun
        assert found[request_id].outputs[0].token_ids == drawn["old" if is_old else "new"][index]
        assert spans(found[request_id].outputs[0]) == [(0 if is_old else 1, 0, 24)]


def test_samples_forks_and_beams_keep_their_versions(engine):
    """A fork has its parent's tokens, and so their versions; beams all have those of their search."""
    params = replace(PARAMS, n=2)
    engine.add_request("samples", PROMPTS[0], params)
    engine.add_request("beams", PROMPTS[1], BeamSearchParams(beam_width=2, max_tokens=12, ignore_eos=True))
    step(engine, 4)
    engine.update_params(NEW, in_flight="recompute")
    step(engine, 1)
    (forked,) = engine.fork("samples")
    found = step(engine)
    samples = found["samples"].outputs
    assert [sample.index for sample in samples] == [0, 1, forked]
    for sample in samples:
        assert [span.version for span in sample.weight_versions] == [0, 1]
        assert sample.weight_versions[-1].end == len(sample.token_ids) == 24
    for beam in found["beams"].outputs:
        assert beam.weight_versions[-1].end == len(beam.token_ids)


def test_a_recomputed_prompt_is_scored_anew(tiny):
    """Some of its tokens were scored by the old weights before the update, in chunks."""
    prompt = [1 + index % 60 for index in range(100)]
    with Engine(tiny, **SIZES, long_prefill_token_threshold=16) as engine:
        engine.add_request("a", prompt, replace(PARAMS, prompt_logprobs=0))
        step(engine, 2)
        engine.update_params(NEW, in_flight="recompute")
        entries = step(engine)["a"].prompt_logprobs[1:]
    got = [entry[token].logprob for token, entry in zip(prompt[1:], entries, strict=True)]
    assert np.abs(np.array(got) - forced_logprobs(1, prompt[:1], prompt[1:])).max() < 1e-4


def test_a_whole_training_state_is_a_tree_too(engine, drawn):
    engine.update_params({"params": NEW, "step": np.zeros((), np.int32), "opt_state": {"mu": NEW}})
    assert tokens(engine.generate(PROMPTS, PARAMS)) == drawn["new"]


def test_an_interrupt_while_newcomers_are_held_back_loses_none(tiny, drawn, monkeypatch):
    with Engine(tiny, **SIZES) as engine:
        begin(engine)
        add_newcomers(engine)
        admission = engine.scheduler.admission
        for name in ("remove", "push"):
            call, calls = getattr(admission.waiting, name), count()

            def interrupt(request, call=call, calls=calls):
                if next(calls) == 1:
                    raise KeyboardInterrupt
                call(request)

            with monkeypatch.context() as patch:
                patch.setattr(admission.waiting, name, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    engine.update_params(NEW, in_flight="wait")
        assert engine.weights_version == 0
        found = step(engine)
    drawn_by_all = [found[request_id].outputs[0].token_ids for request_id in (*IDS, *NEWCOMERS)]
    assert drawn_by_all == [*drawn["old"], *drawn["old"][:2]]


def test_a_prefix_is_pinned_while_outputs_of_ended_requests_wait(engine):
    begin(engine)
    engine.update_params(NEW)
    assert engine.pin_prefix(PROMPTS[0]) == 0
    assert step(engine).keys() == set(IDS)


def test_pins_hold_for_pages_of_the_new_weights(engine):
    prompt = PROMPTS[0]
    engine.pin_prefix(prompt)
    engine.generate([prompt], PARAMS)
    engine.update_params(NEW)
    assert engine.blocks.num_pinned == 2
    engine.generate([prompt], PARAMS)
    hits = engine.stats()["prefix_cache_hits"]
    engine.generate([prompt], PARAMS)
    assert engine.stats()["prefix_cache_hits"] == hits + 16
    engine.unpin_prefix(prompt)
    assert engine.blocks.num_pinned == 0


def test_a_tree_with_a_fault_changes_nothing(engine, drawn):
    begin(engine)
    bad = {**NEW, "model.norm.weight": np.full(CONFIG["hidden_size"], np.nan, np.float32)}
    with pytest.raises(ModelLoadError, match=r"holding a NaN or an infinity: model\.norm\.weight; nothing was changed"):
        engine.update_params(bad, in_flight="abort")
    for leaf, words in (
        (NEW["model.norm.weight"].astype(">f4"), "is >f4, wanted float32"),
        (jax.ShapeDtypeStruct(NEW["model.norm.weight"].shape, "float32"), "is a ShapeDtypeStruct, wanted an array"),
    ):
        with pytest.raises(ModelLoadError, match=rf"model\.norm\.weight {words}"):
            engine.update_params({**NEW, "model.norm.weight": leaf})
    for name, value in (("in_flight", "drain"), ("version", "seven"), ("version", 2**31), ("copy", "no")):
        with pytest.raises(ConfigError, match=f"^{name}: got "):
            engine.update_params(NEW, **{name: value})
    found = step(engine)
    assert [found[request_id].outputs[0].token_ids for request_id in IDS] == drawn["old"]
    assert engine.weights_version == 0


def test_a_call_from_inside_of_a_step_is_refused(tiny, drawn):
    """A scheduling policy is called when a request comes; a clock, as here, within steps."""
    with Engine(tiny, **SIZES) as engine:
        refused = []

        def clock():
            for call in (lambda: engine.update_params(NEW), engine.sleep, engine.wake_up, engine.step):
                try:
                    call()
                except ConfigError as error:
                    refused.append(str(error))
            return 0.0

        for request_id, prompt in zip(IDS, PROMPTS, strict=True):
            engine.add_request(request_id, prompt, PARAMS)
        engine.scheduler.clock, kept = clock, engine.scheduler.clock
        step(engine, 1)
        engine.scheduler.clock = kept
        found = step(engine)
        assert [found[request_id].outputs[0].token_ids for request_id in IDS] == drawn["old"]
    names = ["update_params", "sleep", "wake_up", "step"]
    assert refused[:4] == [f"{name}: got a call from inside of a step, allowed: calls between steps" for name in names]


def test_a_trainer_may_guard_against_transfers_and_donate_its_arrays(engine, drawn):
    tree = jax.tree.map(jax.numpy.asarray, NEW)
    with jax.transfer_guard("disallow_explicit"):
        engine.update_params(tree)
    for leaf in tree.values():
        leaf.delete()
    assert tokens(engine.generate(PROMPTS, PARAMS)) == drawn["new"]


def test_if_the_devices_fail_the_engine_sleeps_until_the_next_update(engine, drawn, monkeypatch):
    begin(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.store, "_take", lambda leaves: 1 / 0)  # As if memory ran out at the last weight.
        with pytest.raises(ZeroDivisionError):
            engine.update_params(NEW, in_flight="recompute")
    assert engine.is_sleeping()
    with pytest.raises(ConfigError, match=r"^step: got an engine that sleeps, without weights"):
        engine.step()
    engine.update_params(OLD)
    found = step(engine)
    assert [found[request_id].outputs[0].token_ids for request_id in IDS] == drawn["old"]


@pytest.mark.parametrize("in_flight", ["wait", "keep", "recompute", "abort"])
def test_an_update_after_a_failed_one_heeds_what_it_is_told(tiny, in_flight, monkeypatch):
    """Requests still have pages of the old weights then, which nothing after it may find."""
    with Engine(tiny, **SIZES, num_decode_steps=1) as engine:
        engine.add_request("a", [5, 6, 7, 8, 9], replace(PARAMS, max_tokens=60))
        step(engine, 2)
        fail_at_the_last_weight(engine, monkeypatch)
        engine.update_params(NEW, in_flight=in_flight)
        found = step(engine)["a"]
        if in_flight == "abort":
            assert found.outputs[0].finish_reason == "abort"
        else:
            assert found.metrics.num_preemptions == 1
        check_no_page_of_other_weights(engine, found)


def fail_at_the_last_weight(engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.store, "_take", lambda leaves: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.update_params(NEW, in_flight="keep")


def check_no_page_of_other_weights(engine, output):
    """Ask for a prompt and what was drawn behind it: the logprobs are those of the new weights alone."""
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids][:40]
    sample = engine.generate([ids], PARAMS)[0].outputs[0]
    got = [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
    assert np.abs(np.array(got) - forced_logprobs(1, ids, sample.token_ids)).max() < 1e-4


def test_pages_of_several_weights_are_found_by_no_other_request(tiny):
    """A kept request's prompt fills no page: its first page is full only after the update, of keys of both weights."""
    with Engine(tiny, **SIZES, num_decode_steps=1) as engine:
        engine.add_request("a", [5, 6, 7, 8, 9], replace(PARAMS, max_tokens=60))
        step(engine, 2)
        engine.update_params(NEW, in_flight="keep")
        hits = engine.stats()["prefix_cache_hits"]
        check_no_page_of_other_weights(engine, step(engine)["a"])
        assert engine.stats()["prefix_cache_hits"] == hits


def test_a_kept_request_with_a_pinned_prefix_ends_well(tiny):
    """Its pages are no longer the pinned ones, and the pool is as small as its sequence."""
    prompt = list(range(1, 66))
    with Engine(tiny, **{**SIZES, "num_blocks": 14, "max_model_len": 104}) as engine:
        engine.generate([prompt], replace(PARAMS, max_tokens=1))
        assert engine.pin_prefix(prompt) == 64
        engine.add_request("a", prompt, replace(PARAMS, max_tokens=36))
        step(engine, 1)
        engine.update_params(NEW, in_flight="keep")
        engine.sleep(1, mode="keep")
        engine.wake_up()
        assert step(engine)["a"].outputs[0].finish_reason == "length"


def test_a_request_that_was_prepared_before_an_update_belongs_to_the_weights_that_it_meets(engine, drawn):
    begin(engine)
    encoded = engine.builder.encoder.encode(PROMPTS[0])
    message = engine.builder.build_encoded("later", encoded, CheckedParams(PARAMS), number=0)
    request = engine.loop.make(message)
    engine.update_params(NEW, in_flight="keep")
    step(engine)
    (output,) = engine.run_until_done([request])
    assert output.outputs[0].token_ids == drawn["new"][0]
    assert spans(output.outputs[0]) == [(1, 0, 24)]


def test_newcomers_wait_for_the_new_weights_also_if_a_step_fails_meanwhile(tiny, drawn, monkeypatch):
    with Engine(tiny, **SIZES) as engine:
        begin(engine)
        add_newcomers(engine)
        dispatch, calls = engine.runner.dispatch, count()
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "dispatch", lambda one: dispatch(one) if next(calls) != 1 else 1 / 0)
            engine.update_params(NEW, in_flight="wait")
        found = step(engine)
    for ids, version, name in ((IDS, 0, "old"), (NEWCOMERS, 1, "new")):
        for request_id, wanted in zip(ids, drawn[name], strict=False):
            assert found[request_id].outputs[0].token_ids == wanted
            assert spans(found[request_id].outputs[0]) == [(version, 0, 24)]


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("num_before", [0, 1])
def test_an_engine_may_be_given_its_own_weights(engine, drawn, copy, num_before):
    for _ in range(num_before):
        engine.update_params(OLD)
    for _ in range(2):
        engine.update_params(engine.params, copy=copy)
        assert tokens(engine.generate(PROMPTS, PARAMS)) == drawn["old"]


def test_arrays_that_are_taken_as_they_are_stay_the_callers(tiny, drawn):
    with Engine(tiny, params=NEW, **SIZES) as other:
        trees = [jax.tree.map(jax.numpy.copy, other.params) for _ in range(2)]
    leaves = jax.tree.leaves(trees)
    with Engine(tiny, **SIZES) as engine:
        for tree, copy in ((trees[0], False), (trees[1], False), (OLD, True), (trees[0], False), (trees[0], True)):
            engine.update_params(tree, copy=copy)
            assert tokens(engine.generate(PROMPTS, PARAMS)) == drawn["old" if tree is OLD else "new"]
        engine.update_params(trees[1], copy=False)
        engine.sleep(2)
        engine.update_params(trees[1], copy=False)
        engine.wake_up()
        assert tokens(engine.generate(PROMPTS, PARAMS)) == drawn["new"]
    assert not any(leaf.is_deleted() for leaf in leaves)


def test_a_head_of_its_own_counts_on_every_way_in_or_is_refused(tmp_path):
    """At start it unties a model whose config ties it; a running engine with one matrix refuses it."""
    directory = write_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    tied = {name: leaf for name, leaf in OLD.items() if name != "lm_head.weight"}
    tied["model.embed_tokens.weight"] = 0.1 * tied["model.embed_tokens.weight"]
    twice, ids = {**tied, "lm_head.weight": 2 * tied["model.embed_tokens.weight"]}, [5, 99, 200, 7, 31]
    save_file(tied, directory / "model.safetensors")
    with Engine(directory, params=twice, **SIZES) as engine:
        untied = np.asarray(engine.logprobs(ids))
        engine.update_params(tied)  # As a trainer has them that ties them.
        wanted = np.asarray(engine.logprobs(ids))
        engine.update_params(twice)
        assert np.array_equal(engine.logprobs(ids), untied)
    with Engine(directory, **SIZES) as engine:
        assert np.abs(engine.logprobs(ids) - wanted).max() < 1e-4 < np.abs(untied - wanted).max()
        with pytest.raises(ModelLoadError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            engine.update_params(twice)
        assert engine.weights_version == 0
        engine.update_params({**tied, "lm_head.weight": tied["model.embed_tokens.weight"].copy()})
        assert np.abs(engine.logprobs(ids) - wanted).max() < 1e-4


@pytest.mark.slow
def test_files_that_have_been_untied_are_not_read_into_a_tied_engine(tmp_path):
    directory = write_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    tied = {name: leaf for name, leaf in OLD.items() if name != "lm_head.weight"}
    save_file(tied, directory / "model.safetensors")
    with Engine(directory, **SIZES) as engine:
        engine.sleep(2)
        save_file({**tied, "lm_head.weight": OLD["lm_head.weight"]}, directory / "model.safetensors")
        with pytest.raises(ModelLoadError, match="its output matrix now differs from its embedding"):
            engine.wake_up()
        del tied["model.norm.weight"]
        save_file(tied, directory / "model.safetensors")
        with pytest.raises(ModelLoadError, match=r"tensor model\.norm\.weight is missing"):
            engine.wake_up()
        engine.update_params({**tied, "model.norm.weight": OLD["model.norm.weight"]})
        engine.wake_up()
        assert len(engine.generate(PROMPTS[:1], PARAMS)) == 1
