"""Sleep gives memory away and takes it back; held requests end with the tokens that they would have had."""

from itertools import count

import jax
import pytest

from jpaged import ConfigError, Engine, SamplingParams

from ..tiny_model import SIZES
from .trainer_requests import IDS, NEW, OLD, PARAMS, PROMPTS, begin, step, tokens

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def of_engine(engine: Engine) -> tuple[int, int]:
    """Return the bytes of an engine's weights, and of all else that it keeps on the device."""
    weights = sum(leaf.nbytes for leaf in engine.runner.store.leaves)
    state = sum(leaf.nbytes for leaf in jax.tree.leaves((engine.runner.state, engine.runner.rules)))
    return weights, state


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_an_engine_sleeps_and_goes_on(tiny, drawn, level, mode, caplog):
    with Engine(tiny, **SIZES) as engine:
        idle, (weights, state) = live_bytes(), of_engine(engine)
        begin(engine)
        engine.sleep(level, mode)
        assert engine.is_sleeping()
        assert idle - live_bytes() >= 0.99 * (state + (weights if level == 2 else 0))
        assert ("a CPU has no other memory" in caplog.text) == (level == 1)
        for call in (lambda: engine.generate(PROMPTS), lambda: engine.logprobs([1, 2])):
            with pytest.raises(ConfigError, match=r": got an engine that sleeps, .*; wake_up\(\) first"):
                call()
        found = {}
        if mode == "keep":
            with pytest.raises(ConfigError, match=r"^step: got an engine that sleeps, .*; wake_up\(\) first"):
                engine.step()
        else:
            found = step(engine)  # What ended before.
            assert not engine.has_unfinished_requests()
        with pytest.raises(ConfigError, match=r"^sleep: got an engine that sleeps"):
            engine.sleep()
        engine.wake_up()
        assert not engine.is_sleeping()
        assert abs(live_bytes() - idle) <= 0.01 * idle
        found |= step(engine)
        if mode == "abort":
            assert {output.outputs[0].finish_reason for output in found.values()} == {"abort"}
        else:
            assert [found[request_id].outputs[0].token_ids for request_id in IDS] == drawn["old"]
        assert tokens(engine.generate(PROMPTS, PARAMS)) == drawn["old"]
        assert engine.stats()["recompiles"] == 0


def test_dropped_weights_are_refilled_by_an_update_and_the_pages_come_back_by_themselves(tiny, drawn):
    with Engine(tiny, params=OLD, **SIZES) as engine:
        begin(engine)
        engine.sleep(2, mode="keep")
        with pytest.raises(ConfigError, match=r"^wake_up: got an engine that was given its weights, .* update_params"):
            engine.wake_up()
        with pytest.raises(ConfigError, match=r"^params: got an engine that sleeps, without weights"):
            _ = engine.params
        engine.wake_up(["weights"])  # As with vLLM, though only the update brings them.
        assert engine.is_sleeping()
        engine.update_params(OLD)
        assert engine.is_sleeping()
        engine.wake_up(["kv_cache"])
        found = step(engine)
        assert [found[request_id].outputs[0].token_ids for request_id in IDS] == drawn["old"]
        engine.update_params(NEW)
        assert tokens(engine.generate(PROMPTS, PARAMS)) == drawn["new"]


def test_what_is_no_level_mode_or_tag_is_refused(tiny):
    with Engine(tiny, **SIZES) as engine:
        for options in ({"level": 3}, {"level": True}, {"mode": "recompute"}):
            with pytest.raises(ConfigError, match=f"^{next(iter(options))}: got "):
                engine.sleep(**options)
        engine.sleep(2)
        for tags in ("weights", ["kv"], 5):
            with pytest.raises(ConfigError, match=r"^tags: got .*, allowed: None, or a list of weights, kv_cache"):
                engine.wake_up(tags)
        engine.wake_up(["weights"])
        engine.wake_up()
        assert len(engine.generate([1, 2], SamplingParams(max_tokens=2))) == 1


def test_a_sleeping_engine_can_be_shut_down(tiny):
    engine = Engine(tiny, **SIZES)
    engine.sleep(2)
    engine.shutdown()
    engine.shutdown()


def test_weights_that_were_updated_are_not_silently_those_of_the_checkpoint_again(tiny, drawn):
    with Engine(tiny, **SIZES) as engine:
        engine.update_params(NEW)
        engine.sleep(2)
        with pytest.raises(ConfigError, match=r"^wake_up: got an engine that was given its weights, and has lost them"):
            engine.wake_up()
        engine.update_params(NEW)
        engine.wake_up()
        assert tokens(engine.generate(PROMPTS, PARAMS)) == drawn["new"]


@pytest.mark.parametrize("num_updates", [0, 2])
def test_weights_move_to_the_hosts_memory_and_back_also_if_the_first_try_fails(tiny, drawn, num_updates, monkeypatch):
    """As sleep does on devices; a CPU of JAX has such a memory too."""
    with Engine(tiny, **SIZES) as engine:
        for _ in range(num_updates):
            engine.update_params(OLD)
        store, put = engine.runner.store, jax.device_put
        for kind in ("pinned_host", None, "pinned_host"):
            calls = count()

            def fail_once(*given, calls=calls, **more):
                return put(*given, **more) if next(calls) != 9 else 1 / 0

            with monkeypatch.context() as patch:
                patch.setattr(jax, "device_put", fail_once)
                with pytest.raises(ZeroDivisionError):
                    store.move(kind)
            store.move(kind)
            kinds = {leaf.sharding.memory_kind for leaf in store.leaves}
            assert kinds == {kind or jax.devices()[0].default_memory().kind}
        engine.update_params(NEW)
        assert tokens(engine.generate(PROMPTS, PARAMS)) == drawn["new"]


class InterruptedSet(set):
    """A set in which the third look is interrupted."""

    def __init__(self):
        self.looks = count(1)

    def __contains__(self, item):
        if next(self.looks) == 3:
            raise KeyboardInterrupt
        return False


def test_an_engine_that_is_interrupted_while_it_falls_asleep_can_be_refilled(tiny, drawn, monkeypatch):
    with Engine(tiny, **SIZES) as engine:
        engine.update_params(OLD)
        monkeypatch.setattr(engine.runner.store, "_borrowed", InterruptedSet())
        with pytest.raises(KeyboardInterrupt):
            engine.sleep(2)
        engine.update_params(OLD)
        engine.wake_up()
        assert tokens(engine.generate(PROMPTS, PARAMS)) == drawn["old"]


def test_weights_on_the_host_are_gone_after_an_update_that_failed(tiny, drawn, monkeypatch):
    with Engine(tiny, params=OLD, **SIZES) as engine:
        engine.runner.store.move("pinned_host")
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner.store, "_take", lambda leaves: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.update_params(NEW)
        with pytest.raises(ConfigError, match=r"^wake_up: got an engine that was given its weights, and has lost them"):
            engine.wake_up()
        engine.update_params(OLD)
        assert tokens(engine.generate(PROMPTS, PARAMS)) == drawn["old"]


def test_while_the_engine_sleeps_an_update_aborts_or_recomputes(tiny, drawn):
    for in_flight in ("abort", "wait"):
        with Engine(tiny, **SIZES) as engine:
            begin(engine)
            engine.sleep(1, mode="keep")
            engine.update_params(NEW, in_flight=in_flight)
            engine.wake_up()
            reasons = {output.outputs[0].finish_reason for output in step(engine).values()}
            assert reasons == {"abort" if in_flight == "abort" else "length"}
            assert tokens(engine.generate(PROMPTS, PARAMS)) == drawn["new"]


def interrupted_after(engine: Engine, num_weights: int) -> None:
    """Update an engine's weights, and be interrupted once so many of them are made."""
    made = count(1)

    def interrupted(key):
        if next(made) > num_weights:
            raise KeyboardInterrupt
        return get(key)

    get, engine.plan.get = engine.plan.get, interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.update_params(NEW, in_flight="keep")
    finally:
        engine.plan.get = get


def test_an_error_names_what_brings_the_weights_back(tiny, drawn):
    """After an update that was interrupted, and for weights of a checkpoint, of a tree, or of an update."""
    for options, is_updated, way_out in (
        ({}, False, "wake_up"), ({"params": OLD}, False, "update_params"), ({}, True, "update_params"),
    ):  # fmt: skip
        with Engine(tiny, **options, **SIZES) as engine:
            if is_updated:
                engine.update_params(OLD)
            begin(engine)
            interrupted_after(engine, 3)
            calls = engine.step, engine.sleep, lambda: engine.generate(PROMPTS), lambda: engine.logprobs([1, 2])
            for call in calls:
                with pytest.raises(ConfigError, match=rf"sleeps.*; {way_out}\(\) first$"):
                    call()
            if way_out == "update_params":
                with pytest.raises(ConfigError, match=r"; update_params\(\) refills them$"):
                    engine.wake_up()
                engine.update_params(OLD, in_flight="keep")
            else:
                engine.wake_up()
            found = step(engine)
            assert [found[request_id].outputs[0].token_ids for request_id in IDS] == drawn["old"]
            engine.update_params(NEW)
            engine.sleep(2)
            with pytest.raises(ConfigError, match=r"; update_params\(\) and then wake_up\(\) first$"):
                engine.generate(PROMPTS)
