"""A model's faults are found before its weights are read."""

import base64
import json

import jax
import numpy as np
import pytest
import tokenizers
from jax.sharding import Mesh
from safetensors.numpy import save_file

from jpaged.config.engine_config import EngineConfig
from jpaged.errors import ConfigError, InvalidRequestError, ModelLoadError
from jpaged.models.formats.files import write_manifest
from jpaged.sampling.logit_rules_spec import LogitRulesSpec
from jpaged.sampling.sampling_params import SamplingParams
from jpaged.startup.open_model import open_model

from ...gguf_file import convert_to_gguf
from ..tiny_model import CONFIG, tensors, write_tiny_model


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
    assert found.eos_token_ids == {2, 0, 4}
    assert found.ends == "2 (<|im_end|>), 0 (<|endoftext|>), 4 (<reponame>)"
    assert found.sampling_defaults == {"temperature": 0.2, "top_p": 0.9}
    assert open_model(EngineConfig(generation_config="none")).sampling_defaults == {}


def test_json_files_may_begin_with_a_byte_order_mark(model):
    generation_config(model, temperature=0.5, eos_token_id=[0, 1])
    for path in model.glob("*.json"):
        path.write_text("\ufeff" + path.read_text(), encoding="utf-8")
    found = handle(model)
    assert (found.sampling_defaults, found.eos_token_ids) == ({"temperature": 0.5}, {0, 1})
    assert found.ends == "0 (<|end|>), 1 (<|start|>)"


def test_tekken_json_alone_is_the_tokenizer_of_a_model_and_is_checked_with_its_other_files(model):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    write_manifest(model)
    vocab = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)]
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(["</s>", "<s>"])]
    settings = {"pattern": r"\S+|\s+", "default_vocab_size": 258, "default_num_special_tokens": 2, "version": "v13"}
    (model / "tekken.json").write_text(json.dumps({"config": settings, "vocab": vocab, "special_tokens": special}))
    with pytest.raises(ModelLoadError, match=r"does not list tekken\.json"):
        handle(model)
    write_manifest(model)
    for options in ({}, {"tokenizer": str(model)}, {"load_format": "dummy"}):
        found = handle(model, **options).tokenizer
        assert found.encode("Hé") == [1, *(2 + byte for byte in "Hé".encode())]
        assert (found.vocab_size, found.bos_token_id, found.eos_token_id) == (258, 1, 0)


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_a_directory_without_a_tokenizer_is_refused_and_served_without_one(model, model_type):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    config = json.loads((model / "config.json").read_text())
    if model_type == "qwen3":
        config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="--tokenizer DIR, or --skip-tokenizer-init") as caught:
        handle(model)
    assert str(model) in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelLoadError, match=r"the directory has no tokenizer, wanted one of tokenizer\.json"):
        handle(model, tokenizer=str(model))
    (model / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: is missing"):
        handle(model, tokenizer=str(model))
    if model_type == "llama":
        assert handle(model, skip_tokenizer_init=True).tokenizer is None


def test_how_answers_are_told_apart_is_checked_at_start(model):
    for options, message in (
        (
            {"tool_call_parser": "hermess"},
            r"^hermess: unknown format, as --tool-call-parser takes it; did you mean her",
        ),
        ({"tool_call_parser": "kimi_k2"}, "^kimi_k2: not available in this version"),
        ({"reasoning_parser": "qwen"}, "^qwen: unknown format, as --reasoning-parser takes it; did you mean qwen3"),
        ({"tool_call_parser": "hermes", "skip_tokenizer_init": True}, "^tool_call_parser: got 'hermes', allowed: none"),
    ):
        with pytest.raises(ConfigError, match=message):
            handle(model, **options)
    assert handle(model, tool_call_parser="qwen3_xml", reasoning_parser="none")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "response_template": {"fields": 5}}))
    with pytest.raises(ConfigError, match="response_template"):
        handle(model)


def test_a_tokenizer_larger_than_the_embedding_is_refused(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": CONFIG["vocab_size"] - 1}))
    with pytest.raises(ModelLoadError, match="the tokenizer has 258 ids, the model's embedding 257 rows"):
        handle(model)


def test_an_added_token_beyond_the_embedding_is_said_at_start_and_refused_in_prompts(model, caplog):
    """As Gemma 3's token for images in its models of text alone."""
    size = CONFIG["vocab_size"]
    backend = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    backend.add_special_tokens(["<image>"])
    backend.save(str(model / "tokenizer.json"))
    generation_config(model, eos_token_id=[0, size])
    with caplog.at_level("INFO", "jpaged"):
        found = handle(model)
    assert f"the model has no rows for its added tokens from id {size} to {size}" in caplog.text
    assert (found.tokenizer.vocab_size, found.tokenizer.base_vocab_size) == (size + 1, size)
    assert found.eos_token_ids == {0}, "no step gives the other"
    encoder = found.prompt_encoder(EngineConfig(model=model), LogitRulesSpec(size), 128)
    assert encoder.encode("a picture").token_ids
    special = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**special, "eos_token": "<image>"}))
    with pytest.raises(ModelLoadError, match=f"the tokenizer's eos_token has the id {size}, the model's embedding"):
        handle(model)
    for prompt in ("a <image>", [5, size]):
        with pytest.raises(InvalidRequestError, match=f"prompt: got token id {size}, out of vocabulary, allowed: 0 to"):
            encoder.encode(prompt)


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


def test_small_files_are_compared_with_the_list_of_sums_at_first_and_those_of_the_weights_at_last(model):
    """Files that nothing reads do not count."""
    write_manifest(model)
    (model / "results.json").write_text("is not read")
    handle(model).check_weight_files()
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + " ")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: its SHA-256 sum begins with"):
        handle(model)
    found = handle(model, skip_tokenizer_init=True)
    save_file(tensors(seed=1), model / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: its SHA-256 sum begins with"):
        found.check_weight_files()
    handle(model, load_format="dummy", skip_tokenizer_init=True).check_weight_files()
    path = model / "SHA256SUMS"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "  config.json" not in line))
    with pytest.raises(ModelLoadError, match=r"does not list config\.json, which would be read: add its sum or"):
        handle(model, skip_tokenizer_init=True)


def test_the_metadata_of_a_gguf_file_are_not_held(tmp_path):
    """They have a vocabulary, which the tokenizer has too."""
    path = convert_to_gguf(tmp_path / "m.gguf", CONFIG, tensors())
    assert handle(path, skip_tokenizer_init=True).checkpoint.file.metadata == {}


def test_a_list_of_sums_beside_a_gguf_file_may_be_about_other_files(tmp_path, caplog):
    """The file is compared only if it is listed; else a line says that it is not."""
    path = convert_to_gguf(tmp_path / "m.gguf", CONFIG, tensors())
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  other.gguf\n")
    with caplog.at_level("INFO", "jpaged"):
        handle(path, skip_tokenizer_init=True).check_weight_files()
    assert "SHA256SUMS: does not list m.gguf, which is not checked" in caplog.text
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  m.gguf\n")
    with pytest.raises(ModelLoadError, match=r"m\.gguf: its SHA-256 sum begins with"):
        handle(path, skip_tokenizer_init=True).check_weight_files()


def test_an_unknown_logical_axis_in_the_rules_is_refused_with_the_nearest_one():
    """Also one of a module's own, where a model comes from files; that is found before its files are looked for."""
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("tp",))
    with pytest.raises(ConfigError, match=r"^head: unknown logical axis in sharding_rules; did you mean heads\?$"):
        handle("not/there", mesh=mesh, sharding_rules={"mlp": "tp", "head": "tp"})
