"""The item `step`: how many launches a layer takes, counted in the compiled programs, and where a step's time goes."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import jax

from jpaged import Engine, SamplingParams
from jpaged.sampling.sampling_params import SampleMode

from .engine_check import DUMMY, LLAMA_8B, TINY_8B, TINY_OPTIONS, before_8b, engine_with
from .items import Item
from .kernel_items import Session, one

NO_LAUNCH = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id",
    "copy-done", "async-done", "iota", "while", "conditional", "call", "async-start", "async-update",
}  # fmt: skip
"""Operations of a compiled program for which the device launches nothing by themselves."""
NUM_LAYERS = (2, 4)
NUM_TOP = 25
"""Kernels of the profile that are reported, the longest first."""
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = .*? ([a-z][a-z0-9-]*)\(")
_CALLEES = re.compile(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)")


def launches(text: str) -> Counter[str]:
    """Return the operations that a compiled program launches, by opcode, loops times their known trip counts.

    `text` is the optimized HLO. "while of unknown length" counts loops whose predicate the host must read on a GPU.
    """
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if line.endswith("{") and (found := re.match(r"(ENTRY )?%?([\w.-]+) \(", line)):
            name = found[2]
            entry, bodies[name] = (name if found[1] else entry), []
        elif name and line.startswith(" "):
            bodies[name].append(line)

    def count(computation: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for line in bodies.get(computation, ()):
            found = _INSTRUCTION.match(line)
            if found is None:
                continue
            opcode = found[1]
            if opcode in ("while", "call", "conditional", "async-start"):
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                times = int(trips[1]) if trips else 1
                if opcode == "while" and not trips:
                    total["while of unknown length"] += 1
                callees = _CALLEES.findall(line)
                branches = re.search(r"branch_computations=\{([^}]*)\}", line)
                callees += re.findall(r"%?([\w.-]+)", branches[1]) if branches else []
                inner = [count(callee) for callee in callees]
                if opcode == "conditional":
                    inner = [max(inner, key=lambda each: each.total(), default=Counter())]
                for each in inner:
                    total += Counter({name: number * times for name, number in each.items()})
            elif opcode not in NO_LAUNCH:
                total[opcode] += 1
        return total

    return count(entry)


def programs(
    engine: Engine, choices: Sequence[Callable[[list[int]], int]], modes: Collection[SampleMode]
) -> dict[str, Counter[str]]:
    """Return the launches of the engine's forward and decode programs of chosen sizes and sampling modes, by name."""
    sizes: dict[tuple[Any, ...], list[int]] = {}
    for key in engine.plan.programs:
        kind, *others = key if isinstance(key, tuple) else (key,)
        if kind in ("forward", "forward_decodes") or (kind == "decode" and others[1] in modes):
            sizes.setdefault((kind, *others[1:]), []).append(others[0])
    keys = [
        (kind, size, *mode)
        for (kind, *mode), each in sizes.items()
        for size in sorted({choose(each) for choose in choices})
    ]
    engine.plan.start(keys)
    names = [" ".join([key[0], str(key[1]), *(mode.value for mode in key[2:])]) for key in keys]
    return {name: launches(engine.plan.get(key).as_text()) for name, key in zip(names, keys, strict=True)}


def try_profile(*arguments: Any) -> Any:
    """Return a profile, or what kept the profiler from making it: the launches are worth having without it."""
    try:
        return profile(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def profile(engine: Engine, prompts: list[list[int]], num_tokens: int, keep: Path | None) -> dict[str, Any]:
    """Return the longest kernels while `prompts` are continued, in ms, and keep the trace as `keep` if it is given."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    engine.generate(prompts, params, use_tqdm=False)  # Compiles.
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            engine.generate(prompts, params, use_tqdm=False)
        (space,) = Path(folder).rglob("*.xplane.pb")
        found = longest_kernels(space)
        if keep is not None:
            shutil.copyfile(space, keep)
            found["trace"] = keep.name
    return found


def longest_kernels(space: Path) -> dict[str, Any]:
    """Return, for each plane of a device in a trace, its busy ms and its longest operations with calls and ms."""
    found: dict[str, Any] = {}
    for plane in jax.profiler.ProfileData.from_file(str(space)).planes:
        if not plane.name.startswith("/device:"):
            continue
        time_ns: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for line in plane.lines:
            if line.name.startswith(("Stream", "XLA Ops")):
                for event in line.events:
                    time_ns[event.name] += event.duration_ns
                    calls[event.name] += 1
        top = {name: {"calls": calls[name], "ms": round(ns / 1e6, 4)} for name, ns in time_ns.most_common(NUM_TOP)}
        found[plane.name] = {"busy_ms": round(time_ns.total() / 1e6, 3), "longest": top}
    return found


def _at_most_8(sizes: list[int]) -> int:
    return max(size for size in sizes if size <= 8)


def measure_step(session: Session) -> dict[str, Any]:
    """Count the launches of a layer of an 8B shape under each backend, and profile decoding with the first one."""
    config = TINY_8B if session.is_tiny else LLAMA_8B
    rows, context = (2, 8) if session.is_tiny else (64, 512)
    fewest, most = (1, 2) if session.is_tiny else NUM_LAYERS
    num_tokens, choices = (3, [_at_most_8]) if session.is_tiny else (32, [min, max])
    modes = [SampleMode.RANDOM] if session.is_tiny else list(SampleMode)
    options: dict[str, Any] = {
        "max_num_seqs": rows, "max_num_batched_tokens": 8192, "max_model_len": context + 64,
        "num_blocks": 2 + rows * -(-(context + 64) // 16),
    }  # fmt: skip
    options = DUMMY | (TINY_OPTIONS if session.is_tiny else options)
    found: dict[str, Any] = {"launches a layer": {}, f"launches of {fewest} layers": {}}
    for backend in session.backends:
        counted = []
        for num_layers in (fewest, most):
            with engine_with({**config, "num_hidden_layers": num_layers}, backend, **options) as engine:
                counted.append(programs(engine, choices, modes))
        fewer, more = counted
        span = most - fewest
        found["launches a layer"][backend] = {
            name: {opcode: (number - fewer[name][opcode]) / span for opcode, number in more[name].items()
                   if number != fewer[name][opcode]}
            for name in more
        }  # fmt: skip
        found[f"launches of {fewest} layers"][backend] = {name: dict(each) for name, each in fewer.items()}
    # Last: on an H100 the profiler sometimes leaves a CUDA context in which nothing runs any more (jax issue 40260).
    prompts = [[1 + row] * context for row in range(rows)]
    keep = None if session.output is None else session.output.with_suffix(".xplane.pb")
    with engine_with({**config, "num_hidden_layers": most}, session.backends[0], **options) as engine:
        found["profile"] = try_profile(engine, prompts, num_tokens, keep)
    return found


def profile_item() -> Item:
    """Return the item."""
    about = "launches a layer of an 8B shape, and a profile of decoding"
    return one("step", 1.8, about, measure_step, environment={}, before_opening=before_8b)
