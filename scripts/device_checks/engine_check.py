"""The items about the whole engine: golden tokens of a small model, and the speed of a model of 8B.

Weights are random and made on the device (`load_format=dummy`). They are the same numbers everywhere, so the tokens
that a CPU found (tests/golden/random_weights.json) hold on every device: each of them was likelier than the next by far
more than bfloat16 rounds.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpaged import Engine, RequestOutput, SamplingParams
from jpaged.config.engine_config import EngineConfig
from jpaged.startup.attention.check_process import check_before_opening
from jpaged.startup.builtin_model import SMOLLM2_135M
from jpaged.startup.open_model import open_model
from jpaged.startup.sizing.host_memory import free_host_bytes
from jpaged.startup.user_cache import user_cache

from . import ROOT
from .items import Goal, Item, Part, Skipped
from .kernel_items import Session, one
from .kernel_speed import copy_loop, times

GOLDEN = ROOT / "tests" / "golden" / "random_weights.json"
SMOLLM2_GOLDEN = ROOT / "tests" / "golden" / "smollm2.json"
NEAR_TIE = 0.1
"""Where the two likeliest tokens are nearer than this in log probability, bfloat16 may find the other one."""
MOST_EXCUSED = 0.001
"""The largest share of compared tokens that may differ by near-ties."""
SMALL_SIZES: dict[str, Any] = {
    "max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 512, "num_blocks": 160, "warmup": "off",
}  # fmt: skip
"""Prompts of more than 128 tokens are computed in pieces beside rows that decode."""
DUMMY: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "warmup": "off"}
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
TINY_8B = {**LLAMA_8B, "vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
TINY_8B |= {"num_attention_heads": 2, "num_key_value_heads": 1}
TINY_OPTIONS: dict[str, Any] = {
    "max_num_seqs": 3, "max_num_batched_tokens": 8, "max_model_len": 264, "num_blocks": 20, "num_host_blocks": 0,
    "enable_prefix_caching": False,
}  # fmt: skip
"""Options of every engine of the tiny model: equal programs are compiled once, whichever item asks for them."""
ROWS, TINY_ROWS = (1, 16, 64, 256), (2, 3)
STEP_BYTES = 3 << 30
"""What a step of 8,192 tokens and its logits take beside weights and pages, about."""
NO_COMMAND_BUFFERS = "engine-8b-no-command-buffers"
GOALS = {"E1": Goal("≥", 0.75, "engine-8b")}


@contextmanager
def model_folder(config: Mapping[str, Any]) -> Iterator[Path]:
    """Make a folder with a model's config and nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield Path(folder)


@contextmanager
def engine_with(model: Path | Mapping[str, Any], backend: str, **options: Any) -> Iterator[Engine]:
    """Make an engine of a model's file or config, served by this attention backend. AssertionError if it is not."""
    with ExitStack() as stack:
        path = model if isinstance(model, Path) else stack.enter_context(model_folder(model))
        engine = stack.enter_context(Engine(path, attention_backend=backend, **options))
        assert engine.backend.name == backend, f"asked for {backend}, but {engine.backend.name} serves"
        yield engine


def check_kernels_first(model: Path | Mapping[str, Any], **options: Any) -> None:
    """Let the engine check its kernels for this model in a child process, before this process opens a GPU.

    An engine does so at its start, but here the worker has opened the GPU by then, and has reserved nearly all of its
    memory: the child would find none, and the kernels would count as broken. The result is remembered for every engine
    that this process makes of the model. Does nothing without a GPU.
    """
    with ExitStack() as stack:
        path = model if isinstance(model, Path) else stack.enter_context(model_folder(model))
        config = EngineConfig(model=str(path), **options)
        check_before_opening(config, open_model(config).spec)


def differences(outputs: Sequence[RequestOutput], items: Sequence[dict[str, Any]]) -> tuple[list[str], int, int]:
    """Return the first token of each output that is wrong, in words, and how many were excused, of how many compared.

    An output is compared up to its first different token: all later ones follow from it.
    """
    wrong, excused, compared = [], 0, 0
    for index, (output, item) in enumerate(zip(outputs, items, strict=True)):
        pairs = zip(output.outputs[0].token_ids, item["output_ids"], item["top1_margin"], strict=False)
        for place, (got, wanted, margin) in enumerate(pairs):
            compared += 1
            if got == wanted:
                continue
            if margin <= NEAR_TIE:
                excused += 1
            else:
                wrong.append(f"prompt {index}, token {place}: got {got}, wanted {wanted}, margin {margin:.2g}")
            break
        else:
            if len(output.outputs[0].token_ids) != len(item["output_ids"]):
                wrong.append(f"prompt {index}: {len(output.outputs[0].token_ids)} tokens")
    return wrong, excused, compared


def wrong_tokens(engine: Engine, items: Sequence[dict[str, Any]], num_runs: int = 2) -> float:
    """Return how many outputs have a wrong token; the second run finds the prompts in the prefix cache.

    Raises AssertionError, which names the first of them, if there is any, or if too many tokens had to be excused.
    """
    params = [
        SamplingParams(temperature=0.0, max_tokens=len(item["output_ids"]), ignore_eos=True, detokenize=False)
        for item in items
    ]
    for _ in range(num_runs):
        outputs = engine.generate([item["prompt_ids"] for item in items], params, use_tqdm=False)
        wrong, excused, compared = differences(outputs, items)
        assert not wrong, f"{len(wrong)} of {len(items)} outputs are wrong: {wrong[0]}"
        assert excused <= MOST_EXCUSED * compared, f"{excused} of {compared} tokens differ where two are nearly equal"
    return 0.0


def small_parts(session: Session) -> dict[str, Part]:
    """Return the golden tokens of the small model, under each backend of this device."""
    golden = json.loads(GOLDEN.read_text())
    items = sorted(golden["items"], key=lambda item: len(item["prompt_ids"]))[: 2 if session.is_tiny else None]

    def run(backend: str) -> float:
        with engine_with(golden["config"], backend, **DUMMY | SMALL_SIZES) as engine:
            return wrong_tokens(engine, items)

    return {f"engine-small, {name}": Part(lambda name=name: run(name), 0.0) for name in session.backends}


def smollm2_parts(session: Session) -> dict[str, Part]:
    """Return the golden tokens of SmolLM2 under each backend of this device, where its file is in the user's cache."""
    path = smollm2_path()
    golden = json.loads(SMOLLM2_GOLDEN.read_text())["items"]
    items = [_until_near_tie(item) for item in golden if item["top1_margin"][0] > NEAR_TIE]

    def run(backend: str) -> float:
        if session.is_tiny:
            raise Skipped("it takes longer than tiny shapes may")
        if not path.is_file():
            raise Skipped(f"there is no {path}")
        with engine_with(path, backend, dtype="bfloat16", **SMALL_SIZES) as engine:
            return wrong_tokens(engine, items)

    return {f"engine-smollm2, {name}": Part(lambda name=name: run(name), 0.0) for name in session.backends}


def smollm2_path() -> Path:
    """Return where the user's cache has the file of SmolLM2, if it was ever fetched."""
    return user_cache("models", SMOLLM2_135M.name) / Path(SMOLLM2_135M.member).name


def _until_near_tie(item: dict[str, Any]) -> dict[str, Any]:
    """Return a golden item up to its first near-tie: torch made it in float32, without a look at margins."""
    margins = item["top1_margin"]
    length = next((place for place, margin in enumerate(margins) if margin <= NEAR_TIE), len(margins))
    return {**item, "output_ids": item["output_ids"][:length], "top1_margin": margins[:length]}


def measure_8b(session: Session) -> dict[str, Any]:
    """Measure decoding at several numbers of rows and one long prompt, beside what the memory's bandwidth allows.

    The roofline of a decode step is the time in which a copy moves the weights, without the table of embeddings, and
    the keys and values of all rows once; E1 is the share of it that the most rows reach.
    """
    config, rows = (TINY_8B, TINY_ROWS) if session.is_tiny else (LLAMA_8B, ROWS)
    prompt_len, context, num_tokens = (8, 8, 36) if session.is_tiny else (8192, 512, 128)
    _check_memory(config, prompt_len + num_tokens)
    copied = session.sizes.copied_bytes
    bandwidth = 2 * copied / times({"copy": copy_loop(copied)}, session.sizes).seconds["copy"]
    options: dict[str, Any] = {
        "max_num_seqs": max(rows), "max_num_batched_tokens": 8192, "max_model_len": prompt_len + 256,
        "enable_prefix_caching": False, "num_host_blocks": 0,
    }  # fmt: skip
    options = DUMMY | (TINY_OPTIONS if session.is_tiny else options)
    found: dict[str, Any] = {"copy_bytes_per_s": bandwidth, "decode": {}, "no room": {}}
    with engine_with(config, session.backends[0], **options) as engine:
        sizes = engine.sizes
        weights_bytes, token_bytes = engine.runner.weights.size_bytes, engine.runner.page_bytes / sizes.step.block_size
        read_bytes = weights_bytes - 2 * config["vocab_size"] * config["hidden_size"]
        found |= {"backend": engine.backend.name, "weights_bytes": weights_bytes, "memory": str(sizes.memory)}
        found["make_s"] = engine.load_s
        found["prompt"] = {"tokens": prompt_len, "tokens_per_s": prompt_len / _prompt_s(engine, prompt_len)}
        for num_rows in rows:
            room = (sizes.num_blocks - 1) * sizes.step.block_size
            if num_rows * (context + num_tokens) > room:
                missing = int((num_rows * (context + num_tokens) - room) * token_bytes)
                found["no room"][f"{num_rows} rows"] = f"{missing} bytes of memory are missing for the pages"
                continue
            rate = _decode_rate(engine, num_rows, context, num_tokens)
            step_bytes = read_bytes + num_rows * (context + num_tokens / 2) * token_bytes
            roofline = num_rows * bandwidth / step_bytes
            found["decode"][f"{num_rows} rows"] = {
                "tokens_per_s": rate, "roofline_tokens_per_s": roofline, "of_roofline": rate / roofline,
            }  # fmt: skip
            found["E1"] = rate / roofline
        found["recompiles"] = engine.stats()["recompiles"]
    if found["no room"]:
        found["notes"] = {"E1": f"at {next(reversed(found['decode']))}: no memory for more"}
    return found


def _check_memory(config: Mapping[str, Any], num_tokens: int) -> None:
    """Raise Skipped, which says how many bytes are missing, if the device has no room for the model and one row."""
    hidden, inner, layers = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    kv = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    numbers = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner) + 2 * config["vocab_size"] * hidden
    needed = 2 * (numbers + num_tokens * layers * 2 * kv) + (STEP_BYTES if hidden == LLAMA_8B["hidden_size"] else 0)
    stats = jax.devices()[0].memory_stats()
    free = stats["bytes_limit"] - stats["bytes_in_use"] if stats else free_host_bytes()
    if needed > free:
        raise Skipped(f"the model needs {needed} bytes of memory, {free} are free, {needed - free} are missing")


def _random_prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, vocab_size, length).tolist()


def _prompt_s(engine: Engine, length: int) -> float:
    """Return the seconds from a prompt of this length to its first token; the first of two runs compiles."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    for seed in range(2):
        prompt = _random_prompt(seed, length, engine.handle.spec.vocab_size)
        start = time.perf_counter()
        engine.generate([prompt], params, use_tqdm=False)
        seconds = time.perf_counter() - start
    return seconds


def _decode_rate(engine: Engine, num_rows: int, context: int, num_tokens: int) -> float:
    """Return the tokens a second of that many rows while all of them decode; the first of two runs compiles."""
    rate = 0.0
    for run in range(2):
        for row in range(num_rows):
            prompt = _random_prompt(row, context, engine.handle.spec.vocab_size)
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
            engine.add_request(f"{run}-{row}", prompt, params)
        counts: dict[str, int] = {}
        marks: list[tuple[float, int]] = []
        """Time and tokens so far, at the end of each step in which every row had begun and none had ended."""
        is_ended = False
        while engine.has_unfinished_requests():
            for output in engine.step():
                counts[output.request_id] = len(output.outputs[0].token_ids)
                is_ended |= output.finished
            if len(counts) == num_rows and min(counts.values()) and not is_ended:
                marks.append((time.perf_counter(), sum(counts.values())))
        assert len(marks) > 1, f"{num_rows} rows never decoded together"
        (start, first), (end, last) = marks[0], marks[-1]
        rate = (last - first) / (end - start)
    return rate


def engine_items(environment: Mapping[str, str], *, has_command_buffers: bool) -> list[Item]:
    """Return the engine's items, each in a process of its own with these variables.

    `has_command_buffers`: XLA records command buffers on this platform, and the 8B model runs without them as well.
    """
    own = dict(environment)
    flags = {**environment, "XLA_FLAGS": "--xla_gpu_enable_command_buffer="}

    def before_small() -> None:
        check_kernels_first(json.loads(GOLDEN.read_text())["config"], **DUMMY | SMALL_SIZES)

    def before_smollm2() -> None:
        if smollm2_path().is_file():
            check_kernels_first(smollm2_path(), dtype="bfloat16", **SMALL_SIZES)

    about = "random 8B in bfloat16: tokens/s beside the roofline"
    small = "golden tokens of a small random model, every backend"
    smollm2 = "golden tokens of SmolLM2, if its file is here"
    items = [
        Item("engine-small", 1.3, small, small_parts, environment=own, before_opening=before_small),
        Item("engine-smollm2", 1.3, smollm2, smollm2_parts, environment=own, before_opening=before_smollm2),
        one("engine-8b", 4.3, about, measure_8b, environment=own, before_opening=before_8b),
    ]
    if has_command_buffers:
        about = "the same without command buffers"
        items.append(one(NO_COMMAND_BUFFERS, 4.3, about, measure_8b, environment=flags, before_opening=before_8b))
    return items


def before_8b() -> None:
    """Check the kernels for the heads of the 8B model, however many layers it has."""
    check_kernels_first(LLAMA_8B, **DUMMY)
