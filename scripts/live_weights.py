"""Measures updates of a running engine's weights, and sleep: time beside one copy, memory, and what requests draw.

    python scripts/live_weights.py --output docs/measurements/live_weights.json    # 100 updates a kind, 15 minutes

The engine serves SmolLM2 in float32 with 16 requests in flight. Trees alternate between two sets of weights. Each
update is timed beside one copy of the same bytes by `jnp.copy`, in turn; figures are medians. Peak memory is that of
the process. First the engine sleeps and wakes 20 times at each level, with the requests held. Exit status 1 says that a
figure is beyond its limit, a token before an update or of a request after it is not that of an engine without updates,
or something was compiled once updates had become usual.

    python scripts/live_weights.py --experts checkpoints/L --output docs/measurements/live_weights_experts.json

measures a model with experts instead, whose checkpoint has a tensor for each expert (scripts/bench/experts.py writes
such a one): an engine of dummy weights gets the checkpoint as it is, another one gets the tensors of all layers and
experts as one, [L, E, …]. Each is updated three times, and then draws what an engine of these weights draws.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged import Engine, SamplingParams
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.step.compile_plan import BACKEND_COMPILE_EVENT

NUM_REQUESTS, MODES = 16, ("wait", "keep", "recompute", "abort")
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True, detokenize=False)
PROMPTS = [[1000 + 37 * index + at for at in range(24 + index)] for index in range(NUM_REQUESTS)]


compilations = [0]
"""How often XLA has compiled something in this process."""


def count_compilation(event: str, duration_secs: float, **_: str | int) -> None:
    compilations[0] += event == BACKEND_COMPILE_EVENT


def tensors_of(engine: Engine) -> dict[str, jax.Array]:
    """Return the checkpoint's tensors in float32, on the device."""
    assert engine.handle.source is not None
    _, checkpoint = open_checkpoint(engine.handle.source.path)
    return {
        name: jnp.asarray(np.asarray(checkpoint.read(name, slice(None)), np.float32)) for name in checkpoint.names()
    }


def stacked(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the tensors of all layers in one array each, [L, …] or [L, E, …], under their names without numbers."""
    found: dict[str, dict[tuple[int, ...], jax.Array]] = {}
    for name, leaf in tree.items():
        numbers = tuple(int(part) for part in name.split(".") if part.isdigit())
        found.setdefault(".".join(part for part in name.split(".") if not part.isdigit()), {})[numbers] = leaf
    stacks = {}
    for name, leaves in found.items():
        last, parts = max(leaves), [leaves[numbers] for numbers in sorted(leaves)]
        stacks[name] = jnp.stack(parts).reshape(*(number + 1 for number in last), *parts[0].shape) if last else parts[0]
    return stacks


def own(engine: Engine) -> dict[str, jax.Array]:
    """Return copies of the engine's weights under their own paths."""
    leaves = nnx.to_flat_state(engine.params)
    return {".".join(map(str, path)): jnp.copy(leaf[...]) for path, leaf in leaves}


def processor() -> str:
    """Return the name of the processor, and how many cores this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def copy(tree: dict[str, jax.Array]) -> None:
    jax.block_until_ready([jnp.copy(leaf) for leaf in tree.values()])


def resident_bytes(field: str) -> int:
    """Return a field of the process's status, such as VmRSS or VmHWM, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return by how much the process grew at most while something ran."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew.
    before = resident_bytes("VmRSS")
    run()
    return resident_bytes("VmHWM") - before


def seconds_and_peak(run: Callable[[], Any]) -> tuple[float, int]:
    """Return the seconds that something takes, and by how many bytes the process grew at most meanwhile."""
    times: list[float] = []
    peak = peak_bytes(lambda: times.append(seconds(run)))
    return times[0], peak


def begin(engine: Engine) -> None:
    """Bring 16 requests into flight: all have drawn some tokens, none its last."""
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(f"{index}", prompt, PARAMS)
    while any(request.first_token_time is None for request in engine.requests.values()):
        engine.step()
    assert len(engine.requests) == NUM_REQUESTS


def finish(engine: Engine) -> dict[str, Any]:
    """Compute all requests to their ends; return their last outputs."""
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step()}
    return found


def time_layout(engine: Engine, trees: list[dict[str, jax.Array]], num_updates: int) -> dict[str, float]:
    """Return the median seconds of an update and of a copy, in turn, and their ratio; nothing is in flight."""
    times: dict[str, list[float]] = {"update": [], "copy": []}
    for index in range(num_updates + 4):
        tree = trees[index % 2]
        taken = {"update": seconds(partial(engine.update_params, tree)), "copy": seconds(partial(copy, tree))}
        if index >= 4:  # The first ones compile, and give back the memory that weights were read into.
            for name, one in taken.items():
                times[name].append(one)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"update_s": medians["update"], "copy_s": medians["copy"], "ratio": medians["update"] / medians["copy"]}


def run_mode(engine: Engine, trees: list[dict[str, jax.Array]], mode: str, num_updates: int) -> dict[str, Any]:
    """Update with 16 requests in flight, again and again; return what was wrong, and how memory went."""
    wanted = []
    for tree in trees:
        engine.update_params(tree)
        wanted.append([output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)])
    live, wrong, stale, peak, num_compiled = [], 0, 0, 0, compilations[0]
    for index in range(num_updates):
        new = (index + 1) % 2  # The engine has the other one's weights.
        engine.update_params(trees[1 - new], version=2 * index)
        begin(engine)
        update = partial(engine.update_params, trees[new], version=2 * index + 1, in_flight=mode)
        peak = max(peak, peak_bytes(update))
        found = finish(engine)
        live.append(sum(array.nbytes for array in jax.live_arrays()))
        for row in range(NUM_REQUESTS):
            sample = found[str(row)].outputs[0]
            first = sample.weight_versions[0]
            is_old = sample.token_ids[: first.end] == wanted[1 - new][row][: first.end] and first.version == 2 * index
            spans = [(span.start, span.end) for span in sample.weight_versions]
            is_whole = spans[0][0] == 0 and spans[-1][1] == len(sample.token_ids)
            wrong += not (is_old and is_whole and len(spans) == (1 if mode in ("wait", "abort") else 2))
        hits = engine.stats()["prefix_cache_hits"]
        after = [output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)]
        # Recomputed requests leave prefixes of the new weights behind.
        stale += engine.stats()["prefix_cache_hits"] - hits if mode != "recompute" else 0
        wrong += after != wanted[new]
    both = 2 * sum(leaf.nbytes for leaf in trees[0].values())
    return {
        "updates": 2 * num_updates,
        "compilations": compilations[0] - num_compiled,
        "wrong": wrong,
        "stale_hits": stale,
        "live_bytes_spread": (max(live) - min(live)) / max(live),
        "peak_beside_both_trees": peak / both,
    }


def run_sleep(engine: Engine, level: int, num_sleeps: int) -> dict[str, Any]:
    """Sleep and wake with 16 requests held, again and again; return what was freed, and what was wrong."""
    wanted = [output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)]
    idle = sum(array.nbytes for array in jax.live_arrays())
    state = sum(leaf.nbytes for leaf in jax.tree.leaves((engine.runner.state, engine.runner.rules)))
    freeable = state + (engine.runner.weights.size_bytes if level == 2 else 0)
    wrong, freed, left = 0, [], []
    for _ in range(num_sleeps):
        begin(engine)
        engine.sleep(level, mode="keep")
        freed.append((idle - sum(array.nbytes for array in jax.live_arrays())) / freeable)
        engine.wake_up()
        found = finish(engine)
        wrong += [found[str(row)].outputs[0].token_ids for row in range(NUM_REQUESTS)] != wanted
        left.append(sum(array.nbytes for array in jax.live_arrays()) / idle)
    return {"sleeps": num_sleeps, "wrong": wrong, "least_freed": min(freed), "most_left_after_waking": max(left)}


def measure_experts(model: str, options: dict[str, Any], output: Path | None) -> int:
    """Update engines of dummy weights by both trees of a checkpoint and write the report; return the exit status."""
    with Engine(model, **options) as engine:
        wanted = [output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)]
        tree = tensors_of(engine)
    trees: dict[str, dict[str, Any]] = {}
    for name in ("tensors", "stacked"):
        if name == "stacked":
            tree = stacked(tree)
        with Engine(model, load_format="dummy", **options) as engine:
            updates, found = list[tuple[float, int]](), list[list[tuple[int, ...]]]()
            for _ in range(3):
                begin(engine)
                updates.append(seconds_and_peak(partial(engine.update_params, tree, in_flight="abort")))
                finish(engine)
                found.append([output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)])
            both = engine.runner.weights.size_bytes + sum(leaf.nbytes for leaf in tree.values())
            trees[name] = {
                "arrays": len(tree),
                "update_s": [update_s for update_s, _ in updates],
                "copy_s": min(seconds(partial(copy, tree)) for _ in range(3)),
                "peak_beside_both_trees": [peak / both for _, peak in updates],
                "wrong": sum(tokens != wanted for tokens in found),
                "recompiles": engine.stats()["recompiles"],
            }
        print(name, trees[name], flush=True)
    report = {"model": Path(model).name, "dtype": "float32", "trees": trees, "processor": processor()}
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n")
    is_right = not any(each["wrong"] or each["recompiles"] for each in trees.values())
    return 0 if is_right and max(max(each["peak_beside_both_trees"]) for each in trees.values()) <= 0.05 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--num-updates", type=int, default=100)
    parser.add_argument("--experts", help="measure this model with experts, a directory without a tokenizer")
    args = parser.parse_args()
    jax.monitoring.register_event_duration_secs_listener(count_compilation)
    options = {"max_num_seqs": NUM_REQUESTS, "max_model_len": 512, "num_blocks": 200, "num_decode_steps": 2}
    if args.experts:
        return measure_experts(args.experts, {"skip_tokenizer_init": True, "dtype": "float32", **options}, args.output)
    with Engine(quantization="none", **options) as engine:
        first = tensors_of(engine)
        trees = {"tensors": [first, {name: leaf * 1.01 for name, leaf in first.items()}]}
        trees["stacked"] = [stacked(tree) for tree in trees["tensors"]]
        trees["own"] = [own(engine)]
        trees["own"].append({name: leaf * 1.01 for name, leaf in trees["own"][0].items()})
        report: dict[str, Any] = {"model": "smollm2-135m", "dtype": "float32", "layouts": {}, "modes": {}}
        report["processor"] = processor()
        engine.plan.start_deferred()
        engine.plan.wait()
        report["sleep"] = {level: run_sleep(engine, level, min(20, args.num_updates)) for level in (1, 2)}
        print(report["sleep"], flush=True)
        both = 2 * sum(leaf.nbytes for leaf in first.values())
        peak = partial(peak_bytes, partial(engine.update_params, first))
        report["first_update_peak_beside_both_trees"] = peak() / both
        for name in ("tensors", "stacked", "own"):
            report["layouts"][name] = time_layout(engine, trees[name], args.num_updates)
            print(name, report["layouts"][name], flush=True)
        del trees["stacked"], trees["own"]
        for mode in MODES:
            report["modes"][mode] = run_mode(engine, trees["tensors"], mode, args.num_updates)
            print(mode, report["modes"][mode], flush=True)
        report["recompiles"] = engine.stats()["recompiles"]
    print("recompiles", report["recompiles"])
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    limits = {"tensors": 2.0, "stacked": 2.0, "own": 1.2}
    is_fast = all(report["layouts"][name]["ratio"] <= limit for name, limit in limits.items())
    modes = report["modes"].values()
    is_right = not any(mode["wrong"] or mode["stale_hits"] or mode["compilations"] for mode in modes)
    peaks = [report["first_update_peak_beside_both_trees"], *(mode["peak_beside_both_trees"] for mode in modes)]
    is_flat = max(peaks) <= 0.05 and all(mode["live_bytes_spread"] <= 0.01 for mode in modes)
    sleeps = report["sleep"].values()
    is_right &= not any(one["wrong"] for one in sleeps)
    is_flat &= all(one["least_freed"] >= 0.99 and one["most_left_after_waking"] <= 1.01 for one in sleeps)
    return 0 if is_fast and is_right and is_flat and not report["recompiles"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
