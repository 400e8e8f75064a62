"""Sizes follow the stated formulas; what cannot be is refused with what is missing."""

import re
from pathlib import Path

import pytest

from jpaged.config import MAX_STEP_TOKENS, EngineConfig
from jpaged.errors import ConfigError
from jpaged.models.config import config_from_hf
from jpaged.sizing import GIB, MAX_SLOTS, Demand, free_host_bytes, requested_max_seqs, size_engine

from .tiny_model import CONFIG

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
    step_bytes=0,
    **options,
):
    """On a CPU the host's free memory is the memory of the pool."""
    config = EngineConfig(**options)
    return size_engine(
        config,
        config_from_hf({**CONFIG, "max_position_embeddings": context, **(model or {})}, Path("config.json")),
        platform=platform,
        free_bytes=free_bytes,
        host_free_bytes=free_bytes if host_free_bytes is None else host_free_bytes,
        block_size_of=block_size_of or (lambda dtype, num_seqs, max_len: config.block_size or 64),
        page_bytes=lambda block_size, dtype: PAGE * block_size // 64 // (1 if dtype == "float32" else 2),
        weights_bytes=lambda dtype: weights // (1 if dtype == "float32" else 2),
        step_bytes=lambda step: step_bytes,
        demands=demands,
    )


def refused(*args, **options):
    with pytest.raises(ConfigError) as caught:
        sized(*args, **options)
    message = str(caught.value)
    assert not re.search(r"(?<!\de)-\d", message), "a negative number explains nothing"
    assert "\n" not in message
    return message


def test_a_cpu_has_its_own_defaults():
    sizes = sized()
    assert (sizes.dtype, sizes.kv_cache_dtype, sizes.block_size) == ("float32", "float32", 64)
    assert (sizes.max_num_seqs, sizes.max_num_batched_tokens, sizes.max_model_len) == (64, 1024, 2048)
    assert sizes.notes == ()


def test_a_device_has_its_own_defaults():
    sizes = sized("gpu", free_bytes=80 * GIB, model={"torch_dtype": "bfloat16"})
    assert (sizes.dtype, sizes.kv_cache_dtype, sizes.block_size) == ("bfloat16", "bfloat16", 64)
    assert (sizes.max_num_seqs, sizes.max_num_batched_tokens) == (256, 8192)
    assert sized("gpu", free_bytes=80 * GIB, model={"torch_dtype": "float16"}).dtype == "bfloat16"
    assert sized("gpu", free_bytes=80 * GIB, model={"torch_dtype": "float32"}).dtype == "float32"
    assert sized("cpu", model={"torch_dtype": "bfloat16"}, dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("case", "pool_pages"),
    [
        ({"free_bytes": 64 * GIB, "context": 8192}, 4 * GIB // PAGE),
        # Half of what the weights leave, in three significant bits.
        ({"free_bytes": WEIGHTS + 2 * 1024 * PAGE}, 1024),
        ({"free_bytes": WEIGHTS + 2 * 1200 * PAGE}, 1024),
        ({"free_bytes": WEIGHTS + 2 * 1300 * PAGE}, 1280),
        # All sequences at full length, and the null page.
        ({"max_num_seqs": 2}, 2 * 32 + 1),
        ({"max_num_seqs": 1, "context": 65}, 3),
    ],
)
def test_the_pool_of_a_cpu(case, pool_pages):
    """min(4 GiB, half of free memory, max_num_seqs × max_model_len)."""
    assert sized(**case).num_blocks == pool_pages


def test_the_pool_of_a_device():
    """0.92 of free memory less weights and one step; or every sequence at full length."""
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
    assert [sized(demands=[Demand(5, 5)] * count).max_num_seqs for count in (1, 2, 3, 5, 64, 65)] == [
        1,
        2,
        4,
        8,
        64,
        64,
    ]
    assert sized(demands=[Demand(5, 5)] * 3, max_num_seqs=10).max_num_seqs == 10
    assert sized(demands=()).max_num_seqs == 64
    assert sized(demands=[Demand(5, 5)]).num_blocks == 32 + 1


def test_one_given_step_size_bounds_the_other():
    sizes = sized(max_num_batched_tokens=16)
    assert (sizes.max_num_batched_tokens, sizes.max_num_seqs) == (16, 16)
    sizes = sized("gpu", free_bytes=80 * GIB, max_num_seqs=10_000)
    assert (sizes.max_num_batched_tokens, sizes.max_num_seqs) == (10_000, 10_000)


def test_max_model_len_is_the_models_or_the_users():
    assert sized(max_model_len=2048).max_model_len == 2048
    assert sized(max_model_len=100, max_num_seqs=1).num_blocks == 3
    assert "max_model_len: got 2049, allowed: at most 2048" in refused(max_model_len=2049)


def test_max_model_len_is_lowered_with_a_note_when_nobody_gave_it_and_all_demands_fit():
    sizes = sized(num_blocks=5, demands=[Demand(200, 56), Demand(100, None)])
    assert sizes.max_model_len == 256
    assert "max_model_len lowered to 256: the pool of 4 pages × 64 tokens" in sizes.notes[0]
    assert sized(num_blocks=33).max_model_len == 2048
    assert sized(num_blocks=32).max_model_len == 31 * 64


def test_otherwise_a_pool_that_holds_no_request_is_refused():
    message = refused(num_blocks=5, max_model_len=257)
    assert "max_model_len: got 257, the pool holds 256 tokens" in message
    assert "lower max_model_len to 256, or raise num_blocks" in message
    assert sized(num_blocks=5, max_model_len=256).notes == ()
    message = refused(num_blocks=5, demands=[Demand(1, 1), Demand(200, 57)])
    assert "num_blocks: the pool holds 256 tokens, one request needs 257" in message
    # A request ends with the context, whatever it asked for.
    assert "one request needs 2048" in refused(num_blocks=5, demands=[Demand(200, 10**6)])


def test_the_smallest_pools():
    assert sized(num_blocks=2).max_model_len == 64
    assert sized(num_blocks=3, block_size=1).max_model_len == 2
    assert "one request needs 2" in refused(num_blocks=2, block_size=1)
    assert sized(kv_cache_memory_bytes=2 * PAGE).num_blocks == 2
    for too_little in (1, PAGE, 2 * PAGE - 1):
        message = refused(kv_cache_memory_bytes=too_little)
        assert f"kv_cache_memory_bytes: got {too_little}, allowed: from {2 * PAGE} to " in message


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
    most = MAX_SLOTS // 64
    assert sized(num_blocks=most, free_bytes=most * PAGE + WEIGHTS).num_blocks == most
    assert f"num_blocks: got {most + 1}, allowed: from 2 to {most} " in refused(num_blocks=most + 1, free_bytes=1 << 60)
    sizes = sized("gpu", free_bytes=1 << 60, context=1 << 30, model={"torch_dtype": "float32"})
    assert sizes.num_blocks == most


def missing_bytes(message):
    return int(re.search(r"(\d+) bytes are missing", message)[1])


def test_a_model_larger_than_memory_is_refused_with_the_bytes_that_are_missing():
    message = refused(free_bytes=WEIGHTS // 4)
    assert message.startswith("model: its weights and a step take at most 1.09 GB, 0.268 GB are free")
    assert sized(free_bytes=WEIGHTS // 4 + missing_bytes(message)).num_blocks >= 2
    assert "bytes are missing" in refused(free_bytes=0)
    # What a step takes is measured where the weights leave room.
    options = {"step_bytes": 10 * PAGE}
    message = refused(free_bytes=WEIGHTS + 8 * PAGE, **options)
    assert message.startswith("model: its weights and a step take 1.08 GB, ")
    enough = WEIGHTS + 8 * PAGE + missing_bytes(message)
    assert sized(free_bytes=enough, **options).num_blocks == 2
    assert missing_bytes(refused(free_bytes=enough - 1, **options)) == 1


def test_a_model_larger_than_a_device_is_refused_with_the_bytes_that_are_missing():
    options = {"device_memory_utilization": 1.0, "model": {"torch_dtype": "float32"}}
    message = refused("gpu", free_bytes=WEIGHTS // 4, **options)
    assert message.startswith("device_memory_utilization: got 1, of 0.268 GB free; weights and a step take at most ")
    assert sized("gpu", free_bytes=WEIGHTS // 4 + missing_bytes(message), **options).num_blocks >= 2
    options["step_bytes"] = 10 * PAGE
    message = refused("gpu", free_bytes=WEIGHTS + 8 * PAGE, **options)
    assert "; weights and a step take 1.08 GB; " in message
    enough = WEIGHTS + 8 * PAGE + missing_bytes(message)
    assert sized("gpu", free_bytes=enough, **options).num_blocks == 2
    assert missing_bytes(refused("gpu", free_bytes=enough - 1, **options)) == 1


# Pages of the host


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
        # Asked to swap, a CPU takes what a device takes: at most 4 GiB, of 16 less weights and 2049 pages.
        ({"preemption_mode": "swap"}, 3 * 1024),
        ({"preemption_mode": "swap", "free_bytes": 64 * GIB}, 4096),
        ({**BIG_GPU, "host_free_bytes": 64 * GIB}, 4096),
        ({**BIG_GPU, "host_free_bytes": 64 * GIB, "preemption_mode": "recompute"}, 4096),
        # A quarter, in three significant bits.
        ({**BIG_GPU, "host_free_bytes": 4 * 1100 * PAGE}, 1024),
        ({**BIG_GPU, "host_free_bytes": 4 * 1300 * PAGE}, 1280),
        ({**BIG_GPU, "host_free_bytes": 4 * 2 * PAGE}, 2),
        ({**BIG_GPU, "host_free_bytes": 4 * 2 * PAGE - 1}, 0),
        ({**BIG_GPU, "host_free_bytes": 0}, 0),
        ({**BIG_GPU, "host_free_bytes": 64 * GIB, "swap_space": 60}, 60 * 1024),
        ({**BIG_GPU, "host_free_bytes": 64 * GIB, "swap_space": 0}, 0),
    ],
)
def test_the_pool_of_the_host(case, host_pages):
    assert sized(**case).num_host_blocks == host_pages


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
def test_swap_space_that_cannot_be_is_refused_with_the_range_that_can(swap_space):
    room = {"num_blocks": 100, "free_bytes": WEIGHTS + 300 * PAGE}
    message = refused(swap_space=swap_space, **room)
    assert message.startswith(f"swap_space: got {swap_space}, allowed: 0 or from ")
    low, high = map(float, re.search(r"from (\S+) to (\S+),", message).groups())
    assert sized(swap_space=low, **room).num_host_blocks == 2
    assert sized(swap_space=high, **room).num_host_blocks in (199, 200)


def test_no_memory_for_a_host_pool_is_said_where_one_is_needed():
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
    most = MAX_SLOTS // 64
    options = {**BIG_GPU, "host_free_bytes": 1 << 60}
    assert sized(num_host_blocks=most, **options).num_host_blocks == most
    assert f"allowed: 0 or from 2 to {most}," in refused(num_host_blocks=most + 1, **options)


# Several samples


def test_known_samples_count_as_the_sequences_that_they_are():
    assert sized(demands=[Demand(5, 5, 3)]).max_num_seqs == 4
    assert sized(demands=[Demand(5, 5, 3), Demand(5, 5, 2)]).max_num_seqs == 8
    # A default makes way for the samples of one prompt, which run together; what was given does not.
    assert sized(demands=[Demand(5, 5, 100)]).max_num_seqs == 128
    assert sized(demands=[Demand(5, 5, 100)], max_num_seqs=8).max_num_seqs == 8
    assert sized(demands=[Demand(5, 5, 100)], max_num_batched_tokens=100).max_num_seqs == 100


def test_the_most_samples_of_a_prompt_are_known_before_the_sizes():
    assert requested_max_seqs(EngineConfig()) is None
    assert requested_max_seqs(EngineConfig(max_num_seqs=8, max_num_batched_tokens=16)) == 8
    assert requested_max_seqs(EngineConfig(max_num_batched_tokens=16)) == 16
    for config in ({"max_num_seqs": 8}, {"max_num_batched_tokens": 16}):
        assert sized(**config).max_num_seqs == requested_max_seqs(EngineConfig(**config))


@pytest.mark.parametrize(
    ("demand", "pages"),
    [
        (Demand(128, 64), 3),
        (Demand(128, 65), 3),  # The last token ends it: its keys are never computed.
        (Demand(128, 66), 4),
        # Each sample computes the prompt's last token anew, in a page of its own.
        (Demand(128, 65, 4), 1 + 2 * 4),
        (Demand(129, 1, 4), 2 + 4),
        (Demand(127, 2, 4), 1 + 4),
        (Demand(127, 3, 4), 1 + 2 * 4),
        (Demand(10, None, 2), 2 * 32),
        (Demand(10, 10**9, 2), 2 * 32),
    ],
)
def test_samples_share_the_full_pages_of_their_prompt(demand, pages):
    assert demand.num_pages(64, 2048) == pages
    assert sized(num_blocks=max(pages, 32) + 1, demands=[demand], max_num_seqs=4).num_blocks == max(pages, 32) + 1
    if pages > 32:
        message = refused(num_blocks=pages, demands=[Demand(1, 1), demand], max_num_seqs=4)
        assert f"n: got {demand.num_samples} samples of a prompt of 10 tokens, which need {pages} pages" in message
        assert f"at most the {pages - 1} pages of the pool; lower n or max_tokens, raise num_blocks" in message


# Prefill first


def test_without_chunked_prefill_a_step_holds_the_longest_prompt():
    assert sized(enable_chunked_prefill=False).max_num_batched_tokens == 2048
    assert sized(enable_chunked_prefill=False, max_model_len=100).max_num_batched_tokens == 1024
    assert sized(enable_chunked_prefill=False, max_num_batched_tokens=2048).max_num_batched_tokens == 2048
    assert sized(max_num_batched_tokens=2047).max_num_batched_tokens == 2047
    message = refused(enable_chunked_prefill=False, max_num_batched_tokens=2047)
    assert (
        "max_num_batched_tokens: got 2047, allowed: at least max_model_len, 2048, while enable_chunked_prefill"
        in message
    )
    assert "raise it, lower max_model_len, or leave chunked prefill on" in message
    gpu = {**BIG_GPU, "context": 32768, "enable_chunked_prefill": False}
    assert sized(**gpu).max_num_batched_tokens == 32768
    # A pool that holds only 256 tokens has lowered max_model_len.
    assert sized(enable_chunked_prefill=False, max_num_batched_tokens=256, num_blocks=5).max_model_len == 256


def test_a_context_beyond_any_step_needs_chunked_prefill():
    assert sized("cpu", context=2 * MAX_STEP_TOKENS, num_blocks=100).max_num_batched_tokens == 1024
    message = refused("cpu", context=2 * MAX_STEP_TOKENS, num_blocks=100, enable_chunked_prefill=False)
    assert (
        f"max_model_len: got {2 * MAX_STEP_TOKENS}, allowed: at most {MAX_STEP_TOKENS} while enable_chunked" in message
    )
    assert "lower it or leave chunked prefill on" in message


# Free memory of the host


def host(tmp_path, groups, files):
    """Folders laid out as Linux does: /proc with 8 GiB available, and control groups."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {8 * GIB // 1024} kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    cgroup.mkdir()
    for name, text in files.items():
        path = cgroup / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return free_host_bytes(proc, cgroup)


def limit_2(folder, limit, used, inactive):
    stat = f"anon 5\ninactive_file {inactive}"
    return {f"{folder}memory.max": limit, f"{folder}memory.current": used, f"{folder}memory.stat": stat}


def limit_1(folder, limit, used, inactive):
    names = "limit_in_bytes", "usage_in_bytes", "stat"
    stat = f"inactive_file 7\ntotal_inactive_file {inactive}"
    return {f"memory/{folder}memory.{name}": text for name, text in zip(names, (limit, used, stat), strict=True)}


HOSTS = {
    "no limit": ("0::/\n", {}, 8 * GIB),
    "the word max": ("0::/\n", limit_2("", "max", 5, 0), 8 * GIB),
    "a container's limit": ("0::/\n", limit_2("", 4 * GIB, GIB, 0), 3 * GIB),
    "idle file pages can be had back": ("0::/\n", limit_2("", 4 * GIB, 3 * GIB, GIB), 2 * GIB),
    "a limit above what there is": ("0::/\n", limit_2("", 64 * GIB, GIB, 0), 8 * GIB),
    "over the limit": ("0::/\n", limit_2("", GIB, 2 * GIB, 0), 0),
    "a group of its own": ("0::/a/b\n", limit_2("a/b/", 2 * GIB, GIB, 0), GIB),
    "a parent is tighter": ("0::/a/b\n", limit_2("a/b/", 6 * GIB, 0, 0) | limit_2("a/", 3 * GIB, 0, 0), 3 * GIB),
    "a path from outside the container": ("0::/docker/x\n", limit_2("", 2 * GIB, 0, 0), 2 * GIB),
    "version 1": ("5:cpu:/\n4:memory:/x/y\n0::/\n", limit_1("x/y/", 5 * GIB, 2 * GIB, GIB), 4 * GIB),
    "version 1 without a limit": ("4:memory:/\n", limit_1("", 9223372036854771712, 5, 0), 8 * GIB),
}


@pytest.mark.parametrize(("groups", "files", "expected"), HOSTS.values(), ids=HOSTS.keys())
def test_free_memory_is_what_the_kernel_and_every_control_group_leave(tmp_path, groups, files, expected):
    assert host(tmp_path, groups, files) == expected


def test_without_linux_the_whole_memory_is_taken_for_free(tmp_path):
    assert free_host_bytes(tmp_path / "none", tmp_path) > 0


def test_this_machines_free_memory_is_a_plausible_number():
    assert 0 <= free_host_bytes() < 1 << 50


def scalar_memory(dtype, num_seqs, max_len):
    """Room for the page numbers of 2 sequences of 64 pages."""
    if num_seqs * max_len // 64 > 128:
        raise ConfigError("max_model_len: too many page numbers")
    return 64


def test_sequences_are_as_many_as_have_room_for_their_page_tables_unless_a_number_was_asked_for():
    sizes = sized("tpu", context=4096, block_size_of=scalar_memory)
    assert (sizes.max_num_seqs, sizes.max_model_len) == (2, 4096)
    assert sizes.notes[0].startswith("max_num_seqs lowered to 2: the device has no room for the page tables")
    assert refused("tpu", context=4096, block_size_of=scalar_memory, max_num_seqs=3) == (
        "max_model_len: too many page numbers"
    )
    refused("tpu", context=128 * 64 + 64, block_size_of=scalar_memory)
    refused("tpu", context=4096, block_size_of=scalar_memory, demands=[Demand(9, 9, num_samples=3)])
