"""A kernel which computes something else than the XLA path, on the device it is to serve on, does not start.

The fast tests check XLA's own backend under the name of a kernel; a slow one checks the TPU kernels, interpreted.
"""

import dataclasses
import logging
import os
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jpaged.pallas_kernels.code_formats import CODE_FORMATS, CodeFormat, CodeParts, Codes
from jpaged.pallas_kernels.kept_files import hash_of_folder
from jpaged.pallas_kernels.native.layer_ops import NativeOps
from jpaged.pallas_kernels.native.processor import processor
from jpaged.pallas_kernels.native.products.chain import code_order
from jpaged.pallas_kernels.native.products.codes.panels import Order, pack_codes
from jpaged.pallas_kernels.ragged_paged_attention.gpu.plan import GpuPlanner
from jpaged.pallas_kernels.ragged_paged_attention.interface import AttentionShape, KVShape
from jpaged.pallas_kernels.ragged_paged_attention.native.backend import NativeBackend
from jpaged.pallas_kernels.ragged_paged_attention.tpu.backend import TpuBackend
from jpaged.pallas_kernels.ragged_paged_attention.tpu.decode_refs import DecodeSizes
from jpaged.pallas_kernels.ragged_paged_attention.tpu.sizes import TpuSizes
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend
from jpaged.startup.attention.check import (
    MAX_CODES_ERRORS,
    MAX_ERROR,
    check_key,
    check_steps,
    codes_error,
    find_failure,
    kernel_error,
    layer_error,
    source_digest,
)
from jpaged.startup.attention.choice import users_tuned
from jpaged.startup.user_cache import user_cache

from ....paged_steps import plan_of
from ....pallas_kernels.native.test_codes import SELDOM
from .test_attention_choice import CPU, MODEL, model_with

SHAPE = AttentionShape(4, 2, 64, kv_dtype="float32")


class Kernels(XlaBackend):
    """A backend that has to be checked and that agrees."""

    name = "pallas-tpu"
    needs_check = True


class WrongHeads(Kernels):
    """A backend that attends with the query heads of the neighbour."""

    def attend(self, pages, layout, inputs):
        return super().attend(pages, layout, dataclasses.replace(inputs, q=jnp.roll(inputs.q, 1, axis=1)))


def check(backend):
    return find_failure(backend, model_with(head_size=64), "float32", "float32", 16, CPU)


def test_a_kernel_that_agrees_is_checked_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert check(Kernels()) is None
    (mark,) = (tmp_path / "jpaged" / "checked").iterdir()
    written = mark.stat().st_mtime_ns
    assert check(Kernels()) is None
    assert mark.stat().st_mtime_ns == written


def test_a_kernel_that_computes_something_else_does_not_start(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert check(WrongHeads()).startswith("it differs from numpy on cpu by ")
    assert not (tmp_path / "jpaged" / "checked").exists()


def test_a_kernel_that_cannot_run_does_not_start(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert check(TpuBackend()).startswith("it failed its check on cpu: ")


@pytest.mark.slow
def test_the_error_of_the_tpu_kernels_is_that_of_rounding():
    sizes = TpuSizes(DecodeSizes(tile=256, full=128, tail=128, max_rows=16, write_slots=8), tile_kv=256, sub_kv=128)
    interpret = pltpu.InterpretParams(dma_execution_mode="on_wait")
    backend = TpuBackend(sizes=sizes, tile_q=128, interpret=interpret)
    assert kernel_error(backend, SHAPE, "float32", 16, CPU) < 1e-5


@pytest.mark.parametrize("home", [None, "/" + 300 * "x"], ids=["no home", "a home that cannot be looked into"])
def test_a_start_without_a_place_for_files_makes_the_check_and_has_no_table(home, monkeypatch, caplog):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 9)  # An id that no user has, as in a container.
    if home is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", home)
    else:
        with pytest.raises(RuntimeError):
            user_cache("checked")
    assert users_tuned(TpuBackend) == ()
    with caplog.at_level(logging.INFO, "jpaged"):
        check(Kernels())
    messages = [record.getMessage() for record in caplog.records]
    assert sum("the check of pallas-tpu is made at each start" in message for message in messages) == 1
    assert any("pallas-tpu agrees with numpy" in message for message in messages)
    assert home is not None or any("this user's table of tile sizes is not looked for" in text for text in messages)


class Blind(XlaBackend):
    """A backend that ignores windows."""

    def attend(self, pages, layout, inputs):
        options = dataclasses.replace(inputs.options, window=None)
        return super().attend(pages, layout, dataclasses.replace(inputs, options=options))


class Uncapped(XlaBackend):
    """A backend that ignores soft caps."""

    def attend(self, pages, layout, inputs):
        options = dataclasses.replace(inputs.options, soft_cap=None)
        return super().attend(pages, layout, dataclasses.replace(inputs, options=options))


class WithoutSinks(XlaBackend):
    """A backend that ignores sinks."""

    def attend(self, pages, layout, inputs):
        return super().attend(pages, layout, dataclasses.replace(inputs, sinks=None))


class SinksOfOtherHeads(XlaBackend):
    """A backend that takes the sink of the neighbour."""

    def attend(self, pages, layout, inputs):
        return super().attend(pages, layout, dataclasses.replace(inputs, sinks=jnp.roll(inputs.sinks, 1)))


class ReadsFirstLayer(XlaBackend):
    """A backend that writes the layer it is told to, and reads the first one."""

    def attend(self, pages, layout, inputs):
        _, pages = super().attend(pages, layout, inputs)
        first = dataclasses.replace(inputs, k=None, v=None, first_page=jnp.int32(0))
        return super().attend(pages, layout, first)


def test_the_check_caps_scores_if_the_model_does():
    capped = dataclasses.replace(SHAPE, has_soft_cap=True)
    assert kernel_error(XlaBackend(), capped, "float32", 16, CPU) < 1e-5
    assert kernel_error(Uncapped(), capped, "float32", 16, CPU) > MAX_ERROR


@pytest.mark.parametrize("kv_dtype", ["float32", pytest.param("int8", marks=pytest.mark.slow)])
def test_the_check_has_sinks_if_the_model_does(kv_dtype):
    with_sinks = dataclasses.replace(SHAPE, has_sinks=True, kv_dtype=kv_dtype)
    assert kernel_error(XlaBackend(), with_sinks, "float32", 16, CPU) < 1e-5
    for wrong in (WithoutSinks, SinksOfOtherHeads):
        assert kernel_error(wrong(), with_sinks, "float32", 16, CPU) > MAX_ERROR


@pytest.mark.slow
def test_the_check_looks_through_the_windows_of_the_model_and_at_a_layer_that_is_not_the_first():
    windowed = dataclasses.replace(SHAPE, windows=(None, 9))
    assert kernel_error(XlaBackend(), windowed, "float32", 16, CPU) < 1e-5
    assert kernel_error(Blind(), SHAPE, "float32", 16, CPU) < 1e-5
    assert kernel_error(Blind(), windowed, "float32", 16, CPU) > MAX_ERROR
    assert not kernel_error(ReadsFirstLayer(), SHAPE, "float32", 16, CPU) <= MAX_ERROR


@pytest.mark.parametrize("long", [1000, 4097])
@pytest.mark.parametrize("block_size", [16, 64, 128, 256])
def test_every_step_of_the_check_fits_into_the_same_shapes_and_one_row_is_long(block_size, long):
    tables, num_tokens, works = check_steps(block_size, long, np.random.default_rng(0))
    assert all(work.sum() <= num_tokens for work in works)
    assert sum(works).tolist() == [3, 19, block_size + 1, block_size + 3, long + 2]
    numbers = tables[tables > 0]
    assert len(set(numbers.tolist())) == len(numbers) == sum(-(-length // block_size) for length in sum(works))


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 64])
def test_the_long_row_of_a_cpu_is_prefilled_in_two_chunks(block_size):
    layout = NativeBackend().layout(KVShape(1, 1, block_size, 2, 64, "float32"))
    context_len = NativeBackend().check_context_len(4, layout, "float32")
    _, _, works = check_steps(block_size, context_len, np.random.default_rng(0))
    assert works[0][4] > 0
    assert works[1][4] > 0
    for query_lens in works:
        is_longer = [query_len != 1 for query_len in query_lens if query_len]
        assert is_longer == sorted(is_longer), "rows of one query come first in a step"


def test_the_long_row_of_a_tpu_has_two_full_tiles_behind_which_it_ends():
    backend = TpuBackend()
    few, more = (backend.layout(KVShape(1, 1, 128, heads, 128, "bfloat16")) for heads in (1, 8))
    assert backend.sizes_for(16, few, "bfloat16").decode.tile == 2048
    assert backend.check_context_len(16, few, "bfloat16") == 4097
    assert backend.check_context_len(32, more, "bfloat16") == 1025


@pytest.mark.parametrize(("heads", "head_size"), [((32, 8), 128), ((28, 4), 128), ((8, 4), 256), ((9, 3), 64)])
@pytest.mark.parametrize(("num_sms", "block_memory"), [(132, 232448), (108, 166912)])
def test_gpu_kernels_merge_what_they_cut_when_the_steps_of_the_check_decode(heads, head_size, num_sms, block_memory):
    chip = {
        "num_sms": num_sms,
        "block_memory": block_memory,
        "split_kv": True,
        "min_share": 6,
        "num_stages": 2,
        "max_tile_kv": 64,
    }
    planner = GpuPlanner(num_heads=heads[0], num_kv_heads=heads[1], head_size=head_size, windows=(), **chip)
    _, num_tokens, works = check_steps(64, 1000, np.random.default_rng(0))
    plan = plan_of(planner, works[-1], sum(works), num_tokens, 8)
    (small,) = planner.sections(num_tokens, 8)[0]
    assert plan[small.num_merges_offset] == 1


def test_another_driver_source_or_window_is_compared_anew(tmp_path):
    def key(model=MODEL, dtype="bfloat16", **device):
        client = SimpleNamespace(platform_version=device.pop("driver", "12.8"))
        return check_key(XlaBackend(), model, dtype, "bfloat16", 64, SimpleNamespace(device_kind="x", client=client))

    assert key() == key()
    assert key(driver="12.9") != key()
    assert key(dtype="float32") != key()
    assert key(model_with(windows=(None, 512))) != key()
    capped = tuple(dataclasses.replace(layer, soft_cap=30.0) for layer in MODEL.layers)
    assert key(dataclasses.replace(MODEL, layers=capped)) != key()
    with_sinks = tuple(dataclasses.replace(layer, has_sinks=True) for layer in MODEL.layers)
    assert key(dataclasses.replace(MODEL, layers=with_sinks)) != key()
    native = NativeBackend()
    assert check_key(native, MODEL, "bfloat16", "bfloat16", 64, CPU)[-5].startswith(processor()), "not only cpu"
    (tmp_path / "gpu.py").write_text("a kernel")
    before = hash_of_folder(tmp_path)
    (tmp_path / "gpu.py").write_text("another")
    assert hash_of_folder(tmp_path) != before
    assert source_digest() in key()


class WrongNorm(NativeOps):
    """Forgets the weight."""

    def rms_norm(self, x, weight, eps):
        return super().rms_norm(x, jnp.ones_like(weight), eps)


class WrongProduct(NativeOps):
    """Multiplies all rows but the last."""

    def product(self, x, weight, num_out):
        return super().product(x, weight, num_out).at[-1].set(0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_looks_at_products_and_norms(dtype):
    assert layer_error(NativeOps(), 48, dtype, CPU) < (1e-5 if dtype == "float32" else 1e-2)
    assert layer_error(WrongNorm(), 48, dtype, CPU) > MAX_ERROR
    assert layer_error(WrongProduct(), 48, dtype, CPU) > MAX_ERROR


class WrongOrder(NativeOps):
    """Packs codes in another order than products read them in, or where these know one order alone, other rows."""

    def packed_codes(self, codes: Codes, code_format: CodeFormat, parts: CodeParts, dtype: str) -> np.ndarray:
        order = code_order(parts, dtype)
        if code_format.is_in_quads:
            return pack_codes(codes.every(-1), code_format, order)
        return pack_codes(codes, code_format, next(other for other in Order if other is not order))


class CoarseRows(NativeOps):
    """Rounds rows to fewer bits than a run promises."""

    def product(self, x, weight, num_out):
        coarse = jnp.float16 if weight.dtype == "float32" else jnp.float8_e4m3fn
        return super().product(x.astype(coarse).astype(jnp.float32), weight, num_out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decoder_that_is_wrong_is_noticed(dtype: str) -> None:
    """Every format is decoded wrongly in one of the dtypes, but for those that are decoded as another one is."""
    formats = [code_format for name, code_format in CODE_FORMATS.items() if name not in SELDOM]
    assert codes_error(NativeOps(), formats, dtype, CPU) < MAX_CODES_ERRORS[dtype] / 2
    for code_format in formats[dtype == "bfloat16" :: 2]:
        assert codes_error(WrongOrder(), [code_format], dtype, CPU) > MAX_ERROR
        assert codes_error(CoarseRows(), [code_format], dtype, CPU) > MAX_CODES_ERRORS[dtype]
