"""Sinks of a checkpoint reach all attention: an engine's, behind windows, on a mesh and in one byte, and a trainer's.

The reference is the tiny model's in float64, with a sink in each head's softmax.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jpaged import Engine, load_module
from jpaged.models.families import table

from .sink_model import FAMILY, OPTIONS, PROMPT, WINDOWS, drawn, sink_tensors, sinks, write_sink_model
from .test_meshes import process
from .tiny_model import reference_logits

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")


@pytest.fixture(scope="module", autouse=True)
def _family() -> Iterator[None]:
    """Put the family into the table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(table.BY_ARCHITECTURE, FAMILY.architecture, FAMILY)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sink_model(tmp_path_factory.mktemp("sinks"))


def reference_logprobs(ids: list[int], seed: int = 0) -> np.ndarray:
    """Return the logprobs [T, V] that follow each token, by numpy, for the sinks of `seed`."""
    return np.asarray(jax.nn.log_softmax(reference_logits(ids, windows=WINDOWS, sinks=sinks(seed)).astype(np.float32)))


def assert_drawn(tokens: list[int], logprobs: list[float], *, seed: int = 0) -> None:
    """Assert that these tokens follow PROMPT by the reference, with these logprobs."""
    wanted = reference_logprobs([*PROMPT, *tokens], seed)[len(PROMPT) - 1 : -1]
    assert tokens == wanted.argmax(axis=-1).tolist()
    np.testing.assert_allclose(logprobs, wanted.max(axis=-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", ["native", pytest.param("xla", marks=pytest.mark.slow)])
def test_an_engine_draws_with_sinks_in_chunks_behind_its_window_and_with_new_ones(model: Path, backend: str) -> None:
    with Engine(str(model), **OPTIONS, attention_backend=backend) as engine:
        assert_drawn(*drawn(engine))
        engine.update_params(sink_tensors(1))
        assert_drawn(*drawn(engine), seed=1)


def test_the_dense_forward_of_a_trainer_has_the_sinks_of_the_checkpoint(model: Path) -> None:
    logprobs = jax.nn.log_softmax(load_module(model)(jnp.array([PROMPT]))[0])
    np.testing.assert_allclose(logprobs, reference_logprobs(PROMPT), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_eight_devices_pad_the_sinks_of_four_heads_as_they_pad_the_heads(model: Path) -> None:
    """Each of 2 KV heads is copied four times, and its 2 query heads are padded to 4."""
    found = json.loads(process("-m", "tests.jpaged.sink_model", str(model)))
    assert_drawn(found["tokens"], found["logprobs"])
    saved, tensors = load_file(model / "saved" / "model.safetensors"), sink_tensors()
    assert saved.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(saved[name], tensor, err_msg=name)


@pytest.mark.slow
def test_pages_of_one_byte_have_no_offsets_where_there_are_sinks(model: Path) -> None:
    with Engine(str(model), **OPTIONS, kv_cache_dtype="int8") as engine:
        found = np.asarray(engine.logprobs(PROMPT))
        scales = engine.runner.state.cache.scales
        assert scales is not None
        for channels in (scales.key_channels, scales.value_channels):
            assert channels is not None
            assert not np.asarray(channels.offsets).any()
    drawn_ids = np.arange(len(PROMPT) - 1), np.array(PROMPT[1:])
    wanted = reference_logprobs(PROMPT)[drawn_ids]
    without_sinks = np.asarray(jax.nn.log_softmax(reference_logits(PROMPT, windows=WINDOWS).astype(np.float32)))
    # int8 alone moves logprobs of this model by 0.12, and sinks move them by 4.
    assert np.abs(found - wanted).max() < 0.05 * np.abs(without_sinks[drawn_ids] - wanted).max()
