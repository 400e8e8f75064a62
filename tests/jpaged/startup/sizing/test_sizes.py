"""Sizes follow their formulas; what memory does not allow is refused with the bytes that are missing."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from jpaged.config.engine_config import MAX_STEP_TOKENS, EngineConfig
from jpaged.errors import ConfigError
from jpaged.kv_cache.page_arithmetic import PageArithmetic
from jpaged.models.opening.reading import config_from_hf
from jpaged.startup.sizing.sizes import GIB, MAX_SLOTS, Demand, FreeMemory, requested_max_seqs, size_engine

from ...tiny_model import CONFIG

PAGE = 1 << 20
"""Bytes of a page of 64 tokens in float32."""
WEIGHTS = GIB


def sized(
    platform="cpu",
    *,
    free_bytes=16 * GIB,
    host_free_bytes=None,
    demands=(),
    context=2048,
    weights=WEIGHTS,
    model=None,
    block_size_of=None,
    num_chips=1,
    converted=0,
    measured=0,
    **options,
):
    """Return the sizes of an engine; `context` is the model's, `weights` are a chip's bytes of float32."""
    config = EngineConfig(**options)
    return size_engine(
        config,
        config_from_hf({**CONFIG, "max_position_embeddings": context, **(model or {})}, Path("config.json")).spec,
        SimpleNamespace(
            block_size=block_size_of or (lambda asked, dtype, num_seqs, max_len: asked or 64),
            page_bytes=lambda block_size, dtype: PAGE * block_size // 64 // (1 if dtype == "float32" else 2),
            weights_bytes=lambda dtype: weights // (1 if dtype == "float32" else 2),
            converted_bytes=lambda dtype: converted,
            measure_bytes=lambda dtype, kv_dtype: 0 if kv_dtype == dtype else measured,
            num_chips=num_chips,
        ),
        FreeMemory(platform, free_bytes, free_bytes if host_free_bytes is None else host_free_bytes),
        demands,
    )


def refused(*args, **options):
    with pytest.raises(ConfigError) as caught:
        sized(*args, **options)
    message = str(caught.value)
    assert not re.search(r"(?<!\de)-\d", message), "negative numbers of bytes or pages are no explanation"
    assert "\n" not in message
    return message


def test_the_defaults_of_a_cpu():
    sizes = sized()
    assert (sizes.step.dtype, sizes.step.kv_cache_dtype, sizes.step.block_size) == ("float32", "float32", 64)
    assert (sizes.step.max_num_seqs, sizes.step.max_num_batched_tokens, sizes.step.max_model_len) == (64, 1024, 2048)
    assert sizes.notes == ()


def test_the_defaults_of_an_accelerator():
    sizes = sized("gpu", free_bytes=80 * GIB, model={"torch_dtype": "bfloat16"})
    assert (sizes.step.dtype, sizes.step.kv_cache_dtype, sizes.step.block_size) == ("bfloat16", "bfloat16", 64)
    assert (sizes.step.max_num_seqs, sizes.step.max_num_batched_tokens) == (256, 8192)
    assert sized("gpu", free_bytes=80 * GIB, model={"torch_dtype": "float16"}).step.dtype == "bfloat16"
    assert sized("gpu", free_bytes=80 * GIB, model={"torch_dtype": "float32"}).step.dtype == "float32"
    assert sized("cpu", model={"torch_dtype": "bfloat16"}, dtype="bfloat16").step.dtype == "bfloat16"


def test_a_step_has_room_for_a_matrix_that_becomes_floats_and_for_measuring_scales_of_pages():
    plain, pages = sized().memory, {"kv_cache_dtype": "int8"}
    assert sized(converted=7).memory.step_bytes == plain.step_bytes + 7
    assert sized(measured=10 * GIB, free_bytes=32 * GIB, **pages).memory.program_bytes == 10 * GIB
    assert sized(measured=1, **pages).memory.program_bytes == plain.program_bytes


def with_room(room=None, **options):
    """Return options; `room` bytes are free beside the weights and what a step takes."""
    if room is None:
        return options
    return {**options, "free_bytes": WEIGHTS + sized(**options).memory.step_bytes + room}


@pytest.mark.parametrize(
    ("case", "pool_pages"),
    [
        ({"free_bytes": 64 * GIB, "context": 8192}, 4 * GIB // PAGE),
        # Half of what weights and a step leave, in three significant bits.
        ({"room": 2 * 1024 * PAGE}, 1024),
        ({"room": 2 * 1200 * PAGE}, 1024),
        ({"room": 2 * 1300 * PAGE}, 1280),
        # All sequences at full length, and the null page.
        ({"max_num_seqs": 2}, 2 * 32 + 1),
        ({"max_num_seqs": 1, "context": 65}, 3),
    ],
)
def test_the_pool_of_a_cpu(case, pool_pages):
    """The pool is min(4 GiB, half of free memory, max_num_seqs × max_model_len)."""
    assert sized(**with_room(**case)).num_blocks == pool_pages


def test_the_pool_of_a_device():
    """The pool is 0.92 of free memory without weights and one step, but at most every sequence at full length."""
    free = 40 * GIB
    page = PAGE // 2
    sizes = sized("gpu", free_bytes=free, context=131072, model={"torch_dtype": "bfloat16"})
    assert 0.85 * free < sizes.num_blocks * page + WEIGHTS // 2 <= 0.92 * free
    half = sized(
        "gpu", free_bytes=free, context=131072, device_memory_utilization=0.46, model={"torch_dtype": "bfloat16"}
    )
    assert sizes.num_blocks - half.num_blocks == pytest.approx(0.46 * free / page, abs=2)
    small = sized("gpu", free_bytes=free, max_num_seqs=4, model={"torch_dtype": "bfloat16"})
    assert small.num_blocks == 4 * 32 + 1


def test_known_demands_bound_the_sequences_by_a_power_of_two():
    assert [sized(demands=[Demand(5, 5)] * count).step.max_num_seqs for count in (1, 2, 3, 5, 64, 65)] == [
        1,
        2,
        4,
        8,
        64,
        64,
    ]
    assert sized(demands=[Demand(5, 5)] * 3, max_num_seqs=10).step.max_num_seqs == 10
    assert sized(demands=()).step.max_num_seqs == 64
    assert sized(demands=[Demand(5, 5)]).num_blocks == 32 + 1


def test_one_given_step_size_bounds_the_other():
    sizes = sized(max_num_batched_tokens=16)
    assert (sizes.step.max_num_batched_tokens, sizes.step.max_num_seqs) == (16, 16)
    sizes = sized("gpu", free_bytes=80 * GIB, max_num_seqs=10_000)
    assert (sizes.step.max_num_batched_tokens, sizes.step.max_num_seqs) == (10_000, 10_000)


def test_max_model_len_is_the_models_or_the_users():
    assert sized(max_model_len=2048).step.max_model_len == 2048
    assert sized(max_model_len=100, max_num_seqs=1).num_blocks == 3
    assert "max_model_len: got 2049, allowed: at most 2048" in refused(max_model_len=2049)


def test_the_default_max_model_len_is_lowered_with_a_note_if_all_demands_fit():
    sizes = sized(num_blocks=5, demands=[Demand(200, 56), Demand(100, None)])
    assert sizes.step.max_model_len == 256
    assert "max_model_len lowered to 256: the pool of 4 pages × 64 tokens" in sizes.notes[0]
    assert sized(num_blocks=33).step.max_model_len == 2048
    assert sized(num_blocks=32).step.max_model_len == 31 * 64


def test_a_pool_too_small_for_the_given_length_or_for_a_demand_is_refused():
    message = refused(num_blocks=5, max_model_len=257)
    assert "max_model_len: got 257, the pool holds 256 tokens" in message
    assert "lower max_model_len to 256, or raise num_blocks" in message
    assert sized(num_blocks=5, max_model_len=256).notes == ()
    message = refused(num_blocks=5, demands=[Demand(1, 1), Demand(200, 57)])
    assert "num_blocks: the pool holds 256 tokens, one request needs 257" in message
    # No request is longer than the context, whatever its max_tokens.
    assert "one request needs 2048" in refused(num_blocks=5, demands=[Demand(200, 10**6)])


def test_the_smallest_pools():
    assert sized(num_blocks=2).step.max_model_len == 64
    assert sized(num_blocks=3, block_size=1).step.max_model_len == 2
    assert "one request needs 2" in refused(num_blocks=2, block_size=1)
    assert sized(kv_cache_memory_bytes=2 * PAGE).num_blocks == 2
    for num_bytes in (1, 2 * PAGE - 1):
        message = refused(kv_cache_memory_bytes=num_bytes)
        assert f"kv_cache_memory_bytes: got {num_bytes}, allowed: from {2 * PAGE} to " in message


def test_a_pool_of_given_bytes_is_used_whole():
    assert sized(kv_cache_memory_bytes=100 * PAGE + 5).num_blocks == 100


def test_a_given_pool_must_fit_into_the_memory_that_the_weights_leave():
    free = WEIGHTS + 100 * PAGE
    assert sized(num_blocks=100, free_bytes=free).num_blocks == 100
    assert "num_blocks: got 101 (0.106 GB), allowed: at most 100" in refused(num_blocks=101, free_bytes=free)
    assert sized(kv_cache_memory_bytes=100 * PAGE, free_bytes=free).num_blocks == 100
    message = refused(kv_cache_memory_bytes=100 * PAGE + 1, free_bytes=free)
    assert f"allowed: at most {100 * PAGE}:" in message
    assert "allowed: at most 0" in refused(num_blocks=10, free_bytes=WEIGHTS // 2)


def test_slots_stay_within_int32():
    max_blocks = MAX_SLOTS // 64
    assert sized(num_blocks=max_blocks, free_bytes=max_blocks * PAGE + WEIGHTS).num_blocks == max_blocks
    message = refused(num_blocks=max_blocks + 1, free_bytes=1 << 60)
    assert f"num_blocks: got {max_blocks + 1}, allowed: from 2 to {max_blocks} " in message
    sizes = sized("gpu", free_bytes=1 << 60, context=1 << 30, model={"torch_dtype": "float32"})
    assert sizes.num_blocks == max_blocks


def missing_bytes(message):
    return int(re.search(r"(\d+) bytes are missing", message)[1])


@pytest.mark.parametrize(
    ("platform", "options", "wanted"),
    [
        ("cpu", {}, "model: its weights and a step take at most 1.09 GB, 0.268 GB are free"),
        (
            "gpu",
            {"device_memory_utilization": 1.0, "model": {"torch_dtype": "float32"}},
            "device_memory_utilization: got 1, of 0.268 GB free; weights and a step take at most ",
        ),
    ],
    ids=["cpu", "gpu"],
)
def test_a_model_larger_than_memory_is_refused_with_the_missing_bytes(platform, options, wanted):
    """With exactly those bytes more it starts."""
    message = refused(platform, free_bytes=WEIGHTS // 4, **options)
    assert message.startswith(wanted)
    enough = WEIGHTS // 4 + missing_bytes(message)
    assert sized(platform, free_bytes=enough, **options).num_blocks == 2
    assert missing_bytes(refused(platform, free_bytes=enough - 1, **options)) == 1


def test_a_length_that_memory_cannot_hold_is_refused_with_the_longest_that_fits():
    """Half of the memory that weights and step leave holds 20 pages, the null page among them."""
    room = {"free_bytes": with_room(2 * 20 * PAGE)["free_bytes"]}
    message = refused(max_model_len=2048, **room)
    longest = int(re.search(r"lower max_model_len to (\d+)", message)[1])
    assert longest == 19 * 64
    assert missing_bytes(message) == (2048 - longest) // 64 * PAGE
    assert sized(max_model_len=longest, **room).num_blocks == 20
    assert missing_bytes(refused(max_model_len=longest + 64, **room)) == PAGE


# The host pool


BIG_GPU = {"platform": "gpu", "free_bytes": 80 * GIB, "model": {"torch_dtype": "float32"}}


@pytest.mark.parametrize(
    ("case", "host_pages"),
    [
        ({}, 0),
        ({"preemption_mode": "recompute"}, 0),
        ({"num_host_blocks": 0}, 0),
        ({"swap_space": 0}, 0),
        ({"num_host_blocks": 2}, 2),
        ({"num_host_blocks": 1000}, 1000),
        ({"swap_space": 0.5}, 512),
        ({"swap_space": 1, "block_size": 16}, 4096),
        ({"swap_space": 2.0009765625}, 2049),
        ({"swap_space": 2.0009}, 2048),
        ({"preemption_mode": "swap", "swap_space": 0.5}, 512),
        # With preemption_mode=swap a CPU has a host pool: a quarter of the free memory, at most 4 GiB.
        ({"preemption_mode": "swap"}, 3 * 1024),
        ({"preemption_mode": "swap", "free_bytes": 64 * GIB}, 4096),
        ({**BIG_GPU, "host_free_bytes": 64 * GIB}, 4096),
        ({**BIG_GPU, "host_free_bytes": 64 * GIB, "preemption_mode": "recompute"}, 4096),
        # A quarter, in three significant bits.
        ({**BIG_GPU, "host_free_bytes": 4 * 1100 * PAGE}, 1024),
        ({**BIG_GPU, "host_free_bytes": 4 * 1300 * PAGE}, 1280),
        ({**BIG_GPU, "host_free_bytes": 4 * 2 * PAGE}, 2),
        ({**BIG_GPU, "host_free_bytes": 4 * 2 * PAGE - 1}, 0),
        ({**BIG_GPU, "host_free_bytes": 64 * GIB, "swap_space": 60}, 60 * 1024),
        ({**BIG_GPU, "host_free_bytes": 64 * GIB, "swap_space": 0}, 0),
    ],
)
def test_the_size_of_the_host_pool(case, host_pages):
    assert sized(**case).num_host_blocks == host_pages


def test_a_host_page_has_the_shares_of_all_chips():
    options = {"platform": "tpu", "host_free_bytes": 400 * PAGE, "swap_space": 300 * PAGE / GIB, "dtype": "float32"}
    assert sized(**options).num_host_blocks == 300
    assert sized(num_chips=4, **options).num_host_blocks == 75


def test_a_host_pool_shares_the_memory_of_a_cpu_with_weights_and_pages():
    free = WEIGHTS + 200 * PAGE
    assert sized(num_blocks=100, num_host_blocks=100, free_bytes=free).num_host_blocks == 100
    message = refused(num_blocks=100, num_host_blocks=101, free_bytes=free)
    assert "num_host_blocks: got 101, allowed: 0 or from 2 to 100, " in message
    assert "change it or free some memory" in message
    # On a device it does not.
    gpu = {"platform": "gpu", "num_blocks": 100, "free_bytes": free, "host_free_bytes": free}
    assert sized(**gpu, num_host_blocks=1000, model={"torch_dtype": "float32"}).num_host_blocks == 1000


@pytest.mark.parametrize("swap_space", [1e-9, 0.001, 0.3, 5.0, 1e6])
def test_an_impossible_swap_space_is_refused_with_the_possible_range(swap_space):
    room = {"num_blocks": 100, "free_bytes": WEIGHTS + 300 * PAGE}
    message = refused(swap_space=swap_space, **room)
    assert message.startswith(f"swap_space: got {swap_space}, allowed: 0 or from ")
    low, high = map(float, re.search(r"from (\S+) to (\S+),", message).groups())
    assert sized(swap_space=low, **room).num_host_blocks == 2
    assert sized(swap_space=high, **room).num_host_blocks in (199, 200)


def test_a_host_without_room_for_the_host_pool_that_was_asked_for_is_refused():
    full = {"num_blocks": 100, "free_bytes": WEIGHTS + 101 * PAGE}
    assert "num_host_blocks: got 2, allowed: 0, with" in refused(num_host_blocks=2, **full)
    assert "swap_space: got 0.5, allowed: 0, with" in refused(swap_space=0.5, **full)
    message = refused(preemption_mode="swap", **full)
    assert message.startswith(
        "preemption_mode: got swap, and a quarter of the host's free memory (0.00105 GB) holds no page"
    )
    assert "free some memory, give num_host_blocks, or allow recompute" in message
    assert "preemption_mode: got swap" in refused(preemption_mode="swap", host_free_bytes=0, **BIG_GPU)


def test_host_slots_stay_within_int32():
    max_blocks = MAX_SLOTS // 64
    options = {**BIG_GPU, "host_free_bytes": 1 << 60}
    assert sized(num_host_blocks=max_blocks, **options).num_host_blocks == max_blocks
    assert f"allowed: 0 or from 2 to {max_blocks}," in refused(num_host_blocks=max_blocks + 1, **options)


# Samples


def test_each_known_sample_counts_as_a_sequence():
    assert sized(demands=[Demand(5, 5, 3)]).step.max_num_seqs == 4
    assert sized(demands=[Demand(5, 5, 3), Demand(5, 5, 2)]).step.max_num_seqs == 8
    # A default rises to the samples of one prompt, which run together; a given number does not.
    assert sized(demands=[Demand(5, 5, 100)]).step.max_num_seqs == 128
    assert sized(demands=[Demand(5, 5, 100)], max_num_seqs=8).step.max_num_seqs == 8
    assert sized(demands=[Demand(5, 5, 100)], max_num_batched_tokens=100).step.max_num_seqs == 100


def test_the_most_samples_of_a_prompt_follow_from_the_options():
    assert requested_max_seqs(EngineConfig()) is None
    assert requested_max_seqs(EngineConfig(max_num_seqs=8, max_num_batched_tokens=16)) == 8
    assert requested_max_seqs(EngineConfig(max_num_batched_tokens=16)) == 16
    for config in ({"max_num_seqs": 8}, {"max_num_batched_tokens": 16}):
        assert sized(**config).step.max_num_seqs == requested_max_seqs(EngineConfig(**config))


@pytest.mark.parametrize(
    ("demand", "pages"),
    [
        (Demand(128, 64), 3),
        (Demand(128, 65), 3),  # The keys of the last token are never computed.
        (Demand(128, 66), 4),
        # Each sample computes the prompt's last token itself, in a page of its own.
        (Demand(128, 65, 4), 1 + 2 * 4),
        (Demand(129, 1, 4), 2 + 4),
        (Demand(127, 2, 4), 1 + 4),
        (Demand(127, 3, 4), 1 + 2 * 4),
        (Demand(10, None, 2), 2 * 32),
        (Demand(10, 10**9, 2), 2 * 32),
    ],
)
def test_samples_share_the_full_pages_of_their_prompt(demand, pages):
    assert demand.num_pages(PageArithmetic((None,), 64), 2048) == pages
    assert sized(num_blocks=max(pages, 32) + 1, demands=[demand], max_num_seqs=4).num_blocks == max(pages, 32) + 1
    if pages > 32:
        message = refused(num_blocks=pages, demands=[Demand(1, 1), demand], max_num_seqs=4)
        assert f"n: got {demand.num_samples} samples of a prompt of 10 tokens, which need {pages} pages" in message
        assert f"at most the {pages - 1} pages of the pool; lower n or max_tokens, raise num_blocks" in message


# Windows


WINDOWED = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 256}
MIXED = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 256,
    "use_sliding_window": True, "max_window_layers": 1,
}  # fmt: skip
"""One layer of full attention, and three groups of one layer with a window."""


def test_layers_with_a_window_take_the_pages_that_they_see_and_compute():
    """A window of 256 tokens sees 4 pages before the current one; a chunk of 128 touches 3 pages."""
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 128}
    assert sized(model=WINDOWED, **options).arithmetic == PageArithmetic((256,), 64, 128)
    assert sized(model=WINDOWED, **options).num_blocks == 2 * (4 + 3) + 1
    assert sized(model=MIXED, **options).arithmetic == PageArithmetic((None, 256, 256, 256), 64, 128)
    assert sized(model=MIXED, **options).num_blocks == 2 * (32 + 3 * 7) + 1
    assert sized(model=WINDOWED, **options, long_prefill_token_threshold=64).num_blocks == 2 * (4 + 2) + 1
    # A step decodes 16 tokens of a sequence.
    small = sized(model=WINDOWED, max_num_seqs=2, max_num_batched_tokens=2, block_size=1)
    assert small.num_blocks == 2 * (255 + 16) + 1


def test_a_pool_holds_the_longest_sequence_that_its_groups_allow():
    options = {"max_num_batched_tokens": 128, "context": 1 << 20}
    assert sized(model=WINDOWED, num_blocks=8, **options).step.max_model_len == 1 << 20
    assert sized(model=WINDOWED, num_blocks=7, **options).step.max_model_len == 6 * 64
    sizes = sized(model=MIXED, num_blocks=1 + 21 + 100, **options)
    assert sizes.step.max_model_len == 100 * 64
    assert "121 pages × 64 tokens in 4 groups of layers (127 MB) holds no longer sequence" in sizes.notes[0]
    message = refused(model=MIXED, num_blocks=1 + 21 + 100, max_model_len=101 * 64, **options)
    assert (missing_bytes(message), "holds 6400 tokens" in message) == (PAGE, True)
    assert sized(model=MIXED, num_blocks=5, demands=[Demand(60, 4)], **options).step.max_model_len == 64
    assert "num_blocks: got 4, allowed: from 5 to" in refused(model=MIXED, num_blocks=4, **options)
    assert "and half of the rest holds too few pages" in refused(model=MIXED, free_bytes=WEIGHTS + 20 * PAGE, **options)


# Without chunked prefill


def test_without_chunked_prefill_a_step_holds_the_longest_prompt():
    assert sized(enable_chunked_prefill=False).step.max_num_batched_tokens == 2048
    assert sized(enable_chunked_prefill=False, max_model_len=100).step.max_num_batched_tokens == 1024
    assert sized(enable_chunked_prefill=False, max_num_batched_tokens=2048).step.max_num_batched_tokens == 2048
    assert sized(max_num_batched_tokens=2047).step.max_num_batched_tokens == 2047
    message = refused(enable_chunked_prefill=False, max_num_batched_tokens=2047)
    assert (
        "max_num_batched_tokens: got 2047, allowed: at least max_model_len, 2048, while enable_chunked_prefill"
        in message
    )
    assert "raise it, lower max_model_len, or leave chunked prefill on" in message
    gpu = {**BIG_GPU, "context": 32768, "enable_chunked_prefill": False}
    assert sized(**gpu).step.max_num_batched_tokens == 32768
    # A pool that holds only 256 tokens has lowered max_model_len.
    assert sized(enable_chunked_prefill=False, max_num_batched_tokens=256, num_blocks=5).step.max_model_len == 256


def test_a_context_beyond_any_step_needs_chunked_prefill():
    assert sized("cpu", context=2 * MAX_STEP_TOKENS, num_blocks=100).step.max_num_batched_tokens == 1024
    message = refused("cpu", context=2 * MAX_STEP_TOKENS, num_blocks=100, enable_chunked_prefill=False)
    assert (
        f"max_model_len: got {2 * MAX_STEP_TOKENS}, allowed: at most {MAX_STEP_TOKENS} while enable_chunked" in message
    )
    assert "lower it or leave chunked prefill on" in message


def scalar_memory(asked, dtype, num_seqs, max_len):
    """Choose the page size of a device with room for 128 page-table entries."""
    if num_seqs * max_len // 64 > 128:
        raise ConfigError("max_model_len: too many page numbers")
    return 64


def test_max_num_seqs_is_lowered_to_the_room_for_page_tables_unless_it_was_given():
    sizes = sized("tpu", context=4096, block_size_of=scalar_memory)
    assert (sizes.step.max_num_seqs, sizes.step.max_model_len) == (2, 4096)
    assert sizes.notes[0].startswith("max_num_seqs lowered to 2: the device has no room for the page tables")
    assert refused("tpu", context=4096, block_size_of=scalar_memory, max_num_seqs=3) == (
        "max_model_len: too many page numbers"
    )
    refused("tpu", context=128 * 64 + 64, block_size_of=scalar_memory)
    refused("tpu", context=4096, block_size_of=scalar_memory, demands=[Demand(9, 9, num_samples=3)])
