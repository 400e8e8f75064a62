"""A model's faults are found before its weights are read."""

import json

import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.models.io.files import write_manifest
from jpaged.sampling.sampling_params import SamplingParams
from jpaged.startup.open_model import open_model

from ..tiny_model import CONFIG, write_tiny_model


@pytest.fixture
def model(tmp_path):
    return write_tiny_model(tmp_path / "tiny")


def handle(model, **options):
    return open_model(EngineConfig(model=model, **options))


def generation_config(model, **values):
    (model / "generation_config.json").write_text(json.dumps(values))


def test_a_handle_has_the_config_the_tensors_and_the_tokenizer(model):
    found = handle(model)
    assert found.source.path == model
    assert found.config.vocab_size == found.tokenizer.vocab_size == CONFIG["vocab_size"]
    assert found.checkpoint.shape("model.embed_tokens.weight") == (CONFIG["vocab_size"], CONFIG["hidden_size"])
    assert found.sampling_defaults == {}
    assert found.eos_token_ids == {0}


def test_the_built_in_model_has_the_sampling_of_its_model_card():
    found = open_model(EngineConfig())
    assert found.source.name == "smollm2-135m"
    assert found.tokenizer.vocab_size == found.config.vocab_size == 49152
    assert found.eos_token_ids == {2}
    assert found.sampling_defaults == {"temperature": 0.2, "top_p": 0.9}
    assert open_model(EngineConfig(generation_config="none")).sampling_defaults == {}


def test_a_tokenizer_larger_than_the_embedding_is_refused(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": CONFIG["vocab_size"] - 1}))
    with pytest.raises(ModelLoadError, match="the tokenizer has 258 ids, the model's embedding 257 rows"):
        handle(model)


def test_an_embedding_larger_than_the_tokenizer_is_padding_and_accepted(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 320}))
    found = handle(model)
    assert (found.config.vocab_size, found.tokenizer.vocab_size) == (320, 258)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_ids_that_end_a_reply_are_collected_from_all_files(model, choice):
    """Files are config, generation config and tokenizer; `--generation-config none` drops only sampling defaults."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": [7, 8]}))
    generation_config(model, eos_token_id=[8, 9], temperature=0.5)
    found = handle(model, generation_config=choice)
    assert found.eos_token_ids == {0, 7, 8, 9}
    assert found.sampling_defaults == ({"temperature": 0.5} if choice == "auto" else {})


def test_a_model_without_any_end_of_reply_is_accepted(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert handle(model).eos_token_ids == frozenset()


def test_the_generation_configs_sampling_becomes_the_default(model):
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1}
    values["repetition_penalty"] = 1.1
    generation_config(model, **values, do_sample=True, transformers_version="5")
    assert handle(model).sampling_defaults == values
    SamplingParams(**handle(model).sampling_defaults)
    generation_config(model, do_sample=False)
    assert handle(model).sampling_defaults == {"temperature": 0.0}


def test_a_default_out_of_range_is_refused_with_the_way_out(model):
    generation_config(model, temperature=5.0)
    with pytest.raises(ModelLoadError, match=r"out of range: temperature: got 5\.0, .* give --generation-config none"):
        handle(model)
    assert handle(model, generation_config="none").sampling_defaults == {}


def test_random_weights_need_no_file_but_the_config(model):
    for path in model.iterdir():
        if path.name != "config.json":
            path.unlink()
    found = handle(model, load_format="dummy")
    assert (found.checkpoint, found.tokenizer) == (None, None)
    assert found.eos_token_ids == {0}
    with pytest.raises(ModelLoadError, match="holds no weights"):
        handle(model)


def test_random_weights_take_a_tokenizer_that_is_there_and_refuse_one_that_is_broken(model):
    assert handle(model, load_format="dummy").tokenizer.vocab_size == CONFIG["vocab_size"]
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: cannot be read"):
        handle(model, load_format="dummy")


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_overrides_of_the_config_count_with_and_without_weights(model, load_format):
    found = handle(model, load_format=load_format, hf_overrides={"rope_theta": 5e5})
    assert {rope.theta for rope in found.config.ropes} == {5e5}


def test_no_tokenizer_is_read_where_none_is_wanted(model):
    (model / "tokenizer.json").write_text("{")
    found = handle(model, skip_tokenizer_init=True)
    assert (found.tokenizer, found.eos_token_ids) == (None, {0})


def test_files_are_compared_with_the_list_of_their_sums_before_they_are_read(model):
    write_manifest(model)
    (model / "README.md").write_text("is not read")
    assert handle(model).tokenizer is not None
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: its SHA-256 sum begins with"):
        handle(model)
    (model / "model.safetensors").write_bytes(b"")
    write_manifest(model)
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"lists model\.safetensors, which is not in the directory"):
        handle(model)
    assert handle(model, load_format="dummy", skip_tokenizer_init=True).checkpoint is None
