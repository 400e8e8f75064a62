"""`LLM` is an `Engine` with the names that scripts for vLLM use."""

import pytest

from jpaged import LLM, BeamSearchParams, Engine, SamplingParams

from .tiny_model import SIZES

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def test_llm_has_the_names_that_scripts_for_vllm_use(tiny: str) -> None:
    with LLM(tiny, **SIZES) as llm:
        assert isinstance(llm, Engine)
        assert llm.engine is llm
        completed = llm.generate(["one"], PARAMS, use_tqdm=False)
        assert len(completed[0].outputs[0].token_ids) == 20
        answered = llm.chat([{"role": "user", "content": "hi"}], PARAMS, use_tqdm=False)
        assert answered[0].prompt.startswith("<|start|>user: hi")
        (search,) = llm.beam_search(["one"], BeamSearchParams(beam_width=2, max_tokens=3), use_tqdm=False)
        assert len(search.outputs) == 2
        assert llm.get_default_sampling_params().max_tokens is None
        assert llm.get_tokenizer().encode("one")
        llm.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate(["one"], PARAMS, use_tqdm=False)
    with pytest.raises(TypeError, match="model"):
        LLM()  # type: ignore[call-arg]
