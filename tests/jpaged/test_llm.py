"""`LLM` says to the engine what it was told, under vLLM's names."""

import numpy as np
import pytest

from jpaged import LLM, BeamSearchParams, InvalidRequestError, SamplingParams

from .tiny_model import write_tiny_model

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


def test_priorities_decide_who_goes_first_and_outputs_keep_the_order_of_the_prompts(model):
    with LLM(model, scheduling_policy="priority", max_num_seqs=1) as llm:
        outputs = llm.generate(["a", "b", "c"], PARAMS, use_tqdm=False, priority=[5, 0, -5])
    assert [output.prompt for output in outputs] == ["a", "b", "c"]
    first, second, third = (output.metrics.first_scheduled_time for output in outputs)
    assert third < second < first


def test_every_way_to_ask_takes_priorities_and_gives_errors_back(model):
    search = BeamSearchParams(beam_width=2, max_tokens=3)
    chats = [[{"role": "user", "content": text}] for text in "abc"]
    with LLM(model, scheduling_policy="priority", max_num_seqs=2) as llm:
        options = {"use_tqdm": False, "priority": [np.int64(5), -5, 0], "on_error": "return"}
        for target in (llm, llm.engine):
            for outputs in (
                target.generate(["a", "b", ""], PARAMS, **options),
                target.chat([chats[0], chats[1], []], PARAMS, **options),
                target.beam_search(["a", "b", ""], search, **options),
            ):
                assert [output.error is None for output in outputs] == [True, True, False]
                assert outputs[1].metrics.first_scheduled_time <= outputs[0].metrics.first_scheduled_time
        assert len(llm.generate(["a", "b"], PARAMS, use_tqdm=False, priority=np.int64(3))) == 2
        with pytest.raises(InvalidRequestError, match="prompt 2"):
            llm.chat([*chats[:2], []], PARAMS, use_tqdm=False)


def test_a_priority_under_fcfs_is_refused_with_the_index_of_its_prompt(model):
    with LLM(model) as llm:
        with pytest.raises(
            InvalidRequestError, match="prompt 1: priority: got 3 under scheduling_policy fcfs"
        ) as caught:
            llm.generate(["a", "b"], PARAMS, use_tqdm=False, priority=[0, 3])
        assert caught.value.param == "priority"
        with pytest.raises(InvalidRequestError, match="prompt 0: priority: got 7 under scheduling_policy fcfs"):
            llm.generate({"prompt": "a", "priority": 7}, PARAMS, use_tqdm=False)
        assert len(llm.generate(["a", "b"], PARAMS, use_tqdm=False, priority=[0, 0])) == 2
