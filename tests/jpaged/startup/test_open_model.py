"""What can be wrong with a model is found before its weights are read."""

import json

import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.opening import open_for_engine
from jpaged.sampling_params import SamplingParams

from .tiny_model import CONFIG, write_tiny_model


@pytest.fixture
def model(tmp_path):
    return write_tiny_model(tmp_path / "tiny")


def opened(model, **options):
    return open_for_engine(EngineConfig(model=model, **options))


def generation_config(model, **values):
    (model / "generation_config.json").write_text(json.dumps(values))


def test_a_model_is_opened_with_all_that_belongs_to_it(model):
    found = opened(model)
    assert found.source.path == model
    assert found.config.vocab_size == found.tokenizer.vocab_size == CONFIG["vocab_size"]
    assert found.checkpoint.shape("model.embed_tokens.weight") == (CONFIG["vocab_size"], CONFIG["hidden_size"])
    assert found.sampling_defaults == {}
    assert found.eos_token_ids == {0}


def test_the_built_in_model_is_opened_with_its_makers_sampling():
    found = open_for_engine(EngineConfig())
    assert found.source.name == "smollm2-135m"
    assert found.tokenizer.vocab_size == found.config.vocab_size == 49152
    assert found.eos_token_ids == {2}
    assert found.sampling_defaults == {"temperature": 0.2, "top_p": 0.9}
    assert open_for_engine(EngineConfig(generation_config="none")).sampling_defaults == {}


def test_a_tokenizer_larger_than_the_embedding_is_refused(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": CONFIG["vocab_size"] - 1}))
    with pytest.raises(ModelLoadError, match="the tokenizer has 258 ids, the model's embedding 257 rows"):
        opened(model)


def test_an_embedding_larger_than_the_tokenizer_is_padding_and_taken(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 320}))
    found = opened(model)
    assert (found.config.vocab_size, found.tokenizer.vocab_size) == (320, 258)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_every_id_that_ends_a_reply_is_joined_from_all_files(model, choice):
    """Config, generation config and tokenizer; ends of replies are no sampling default that `none` could drop."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": [7, 8]}))
    generation_config(model, eos_token_id=[8, 9], temperature=0.5)
    found = opened(model, generation_config=choice)
    assert found.eos_token_ids == {0, 7, 8, 9}
    assert found.sampling_defaults == ({"temperature": 0.5} if choice == "auto" else {})


def test_a_model_without_any_end_of_reply_is_taken(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert opened(model).eos_token_ids == frozenset()


def test_the_generation_configs_sampling_becomes_the_default(model):
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1}
    values["repetition_penalty"] = 1.1
    generation_config(model, **values, do_sample=True, transformers_version="5")
    assert opened(model).sampling_defaults == values
    SamplingParams(**opened(model).sampling_defaults)
    generation_config(model, do_sample=False)
    assert opened(model).sampling_defaults == {"temperature": 0.0}


def test_a_default_out_of_range_ends_the_start_and_says_the_way_out(model):
    generation_config(model, temperature=5.0)
    with pytest.raises(ModelLoadError, match=r"out of range: temperature: got 5\.0, .* give --generation-config none"):
        opened(model)
    assert opened(model, generation_config="none").sampling_defaults == {}
