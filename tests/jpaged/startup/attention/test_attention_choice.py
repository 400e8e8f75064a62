"""Which attention serves, and what its pages are."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jpaged.errors import ConfigError
from jpaged.models.opening.reading import config_from_hf
from jpaged.pallas_kernels.native import ffi
from jpaged.pallas_kernels.ragged_paged_attention.names import BACKENDS
from jpaged.pallas_kernels.ragged_paged_attention.native import backend as native_backend
from jpaged.pallas_kernels.ragged_paged_attention.native.backend import NativeBackend
from jpaged.pallas_kernels.ragged_paged_attention.tpu.backend import TpuBackend
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend
from jpaged.startup.attention.choice import attention_shape, block_size_of, choose_attention, load_backend

from ...tiny_model import CONFIG

TINY = config_from_hf({**CONFIG, "num_attention_heads": 4, "num_key_value_heads": 2}, Path("config.json"))
MODEL = TINY.spec
CPU = jax.devices("cpu")[0]
HAS_MMA = jax.__version_info__ >= (0, 11)
"""The version decides: a later JAX without `mma` must fail the tests of kernels that use it."""


def model_with(**changes):
    return dataclasses.replace(TINY, **changes).spec


def tpu(kind="TPU v6 lite"):
    return SimpleNamespace(platform="tpu", device_kind=kind)


def a100(**changes):
    known = {"device_kind": "NVIDIA A100", "compute_capability": "8.0"}
    sizes = {"core_count": 108, "shared_memory_per_block_optin": 166912}
    return SimpleNamespace(platform="gpu", **{**known, **sizes, **changes})


def choose(asked, model, device, kv_dtype="bfloat16", **options):
    return choose_attention(asked, attention_shape(model, kv_dtype), [device], **options)


def test_each_platform_has_its_default():
    assert choose("auto", MODEL, CPU).backend == NativeBackend()
    for kind, chip in (("TPU v5 lite", "v5e"), ("TPU v6 lite", "v6e"), ("TPU7x", "v7x")):
        backend = choose("auto", model_with(head_size=128), tpu(kind)).backend
        assert (backend.name, backend.chip) == ("pallas-tpu", chip)


def test_every_backend_of_the_table_has_the_name_and_page_size_that_it_is_listed_with():
    for entry in BACKENDS:
        backend = load_backend(entry)
        assert (backend.name, backend.block_sizes[0]) == (entry.name, entry.block_size)


def test_a_start_on_a_gpu_takes_its_kernels_or_says_why_not():
    if HAS_MMA:
        chosen = choose("auto", model_with(head_size=64), a100())
        assert chosen.backend.name == "pallas-gpu"
        assert chosen.reason == "the default on gpu; not yet verified on NVIDIA A100 by scripts/gpu_check.py"
        too_old = a100(device_kind="Tesla T4", compute_capability="7.5")
        assert choose("auto", MODEL, too_old).reason.startswith("not pallas-gpu: ")
    else:
        reason = f"not pallas-gpu: it needs jax 0.11 or later, this is {jax.__version__}"
        assert choose("auto", MODEL, a100()).reason == reason
    assert choose("xla", MODEL, a100()).reason == "asked for"
    assert choose("auto", MODEL, CPU).reason == "the default on cpu"


def test_a_default_that_does_not_take_the_model_says_so_and_one_asked_for_is_refused():
    chosen = choose("auto", model_with(head_size=48), tpu())
    assert chosen.backend.name == "xla"
    assert "head_size: got 48, the pallas-tpu backend takes 64, 80, 96" in chosen.reason
    with pytest.raises(ConfigError, match=r"head_size: got 48.*use --attention-backend xla"):
        choose("pallas-tpu", model_with(head_size=48), tpu())
    large = model_with(num_heads=40, num_kv_heads=40, head_size=128)
    assert choose("auto", large, tpu("TPU7x")).backend.name == "pallas-tpu"
    chosen = choose("auto", large, tpu("TPU7x"), "float32")
    assert chosen.backend.name == "xla"
    assert "40 KV heads of 128 in float32 the pallas-tpu backend would need 66 MiB" in chosen.reason
    assert "this device is TPU v3" in choose("auto", model_with(head_size=128), tpu("TPU v3")).reason


def test_a_deterministic_engine_is_not_given_kernels_that_are_not():
    chosen = choose("auto", model_with(head_size=128), tpu(), deterministic=True)
    assert chosen.backend.name == "xla"
    assert chosen.reason.startswith(
        "not pallas-tpu: deterministic is true, and its kernels round a prompt as it is cut"
    )


def test_kernels_of_another_platform_are_refused():
    with pytest.raises(
        ConfigError, match=r"attention_backend: got pallas-tpu, allowed on this device \(cpu\): auto, xla, native;"
    ):
        choose("pallas-tpu", MODEL, CPU)


def test_native_code_is_refused_by_name_where_it_cannot_serve(monkeypatch):
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    with pytest.raises(ConfigError, match=r"got native, allowed on this device \(NVIDIA H200\): auto, xla, pallas"):
        choose("native", MODEL, gpu)
    shape = attention_shape(MODEL, "float32")
    with pytest.raises(ConfigError, match=r"got native, .* one CPU device, and there are 2; use .* xla"):
        choose_attention("native", shape, [CPU, CPU])
    chosen = choose_attention("auto", shape, [CPU, CPU])
    assert (chosen.backend, chosen.is_replacement) == (XlaBackend(), True)
    header = ffi.interface_header().replace("_API_MAJOR 0", "_API_MAJOR 1")
    monkeypatch.setattr(native_backend, "interface_header", lambda: header)
    with pytest.raises(ConfigError, match=r"got native, which cannot serve here: jaxlib .*; use .* xla"):
        choose("native", MODEL, CPU)
    assert choose("auto", MODEL, CPU).backend == XlaBackend()


def test_a_backend_asked_for_by_name_is_taken():
    assert choose("xla", model_with(head_size=128), tpu()).backend.name == "xla"
    unverified = "; not yet verified on TPU v6 lite by scripts/tpu_check.py"
    assert choose("pallas-tpu", model_with(head_size=128), tpu()).reason == f"asked for{unverified}"


@pytest.mark.skipif(not HAS_MMA, reason="the GPU kernels need jax 0.11")
def test_gpu_kernels_are_made_for_the_chip_they_are_asked_for_on():
    gpu = a100()
    model = model_with(head_size=64, windows=(None, 512))
    chosen = choose("pallas-gpu", model, gpu).backend
    assert (chosen.num_sms, chosen.block_memory, chosen.capability, chosen.windows) == (108, 166912, (8, 0), (512,))
    gpu.compute_capability = "7.5"
    with pytest.raises(ConfigError, match="kernels run from Ampere"):
        choose("pallas-gpu", model, gpu)


@pytest.mark.skipif(HAS_MMA, reason="this jax has what the GPU kernels need")
def test_gpu_kernels_need_a_later_jax_than_some_have():
    gpu = SimpleNamespace(
        platform="gpu", device_kind="x", compute_capability="9.0", core_count=132, shared_memory_per_block_optin=232448
    )
    with pytest.raises(ConfigError, match=r"its kernels need jax 0.11.*use --attention-backend xla"):
        choose("pallas-gpu", MODEL, gpu)


def pages_of(backend, asked, max_num_seqs, max_model_len, num_kv_heads=8, dtype="bfloat16"):
    shape = attention_shape(model_with(num_kv_heads=num_kv_heads, head_size=128), dtype)
    return block_size_of(backend, shape, asked, max_num_seqs, max_model_len)


def test_pages_grow_until_the_page_table_fits():
    kernels = TpuBackend()
    assert pages_of(XlaBackend(), None, 256, 131072) == 64
    assert pages_of(kernels, None, 64, 8192) == 128
    assert pages_of(kernels, None, 256, 131072) == 256, "Llama-3.1 as it comes"
    assert pages_of(kernels, None, 256, 262144) == 512
    assert pages_of(kernels, None, 128, 1048576) == 1024
    assert pages_of(kernels, None, 160, 262144) == 512, "the largest steps have room for 256 rows"
    assert pages_of(kernels, None, 1024, 253952 // 1024 * 128) == 256, "a row's lengths and tiles need room, too"
    assert pages_of(kernels, 16, 64, 8192) == 16
    with pytest.raises(ConfigError, match=r"max_model_len: got 163840 for 192 sequences and pages of 128 tokens, 3"):
        pages_of(kernels, 128, 192, 163840)
    with pytest.raises(
        ConfigError, match=r"max_model_len: got 1048576 for 256 sequences.*allowed: 255000.*lower max_num_seqs or max_"
    ):
        pages_of(kernels, None, 256, 1048576)
    with pytest.raises(ConfigError, match=r"pages of 16 tokens.*raise block_size"):
        pages_of(kernels, 16, 256, 131072)


def test_pages_grow_no_further_than_a_core_has_room_for():
    """32 KV heads in float32 on v7x: a page of 256 tokens is too large for the tiles of decode."""
    small, large = TpuBackend("v7x"), TpuBackend("v6e")
    assert pages_of(large, None, 256, 131072, num_kv_heads=32, dtype="float32") == 256
    assert pages_of(small, None, 128, 131072, num_kv_heads=32, dtype="float32") == 128
    with pytest.raises(ConfigError, match=r"pages of 128 tokens, 264192 numbers of page tables"):
        pages_of(small, None, 256, 131072, num_kv_heads=32, dtype="float32")
