"""Measures structured output beside free text: tokens per second, the first token, and the host's time for masks.

    python scripts/bench/structured.py --output docs/measurements/structured.json      # 15 minutes

SmolLM2-135M, `num_decode_steps=1`. At each number of rows three batches take turns: free text, half of the rows
structured, all of them. Their outputs are equally long, since free text ignores EOS and each schema is an array whose
items go on beyond the end: strings, enums, numbers, nested arrays. Then the time to the first token of a request with
a schema of 2 KB that is new, of one that was seen before, and without one; the time of masks for vocabularies of
several sizes; and the steps of eight streams while requests with bad schemas come. Figures are medians. Exit status 1
says that a program was compiled within a step; speeds are printed and not judged.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from live_weights import processor, seconds

from jpaged import Engine, InvalidRequestError, SamplingParams
from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.text.grammar.grammar import Grammars
from jpaged.text.tokenizing.tokenizer import load_tokenizer

MODEL = "smollm2-135m"
ITEMS: dict[str, Any] = {
    "strings": {"type": "string", "minLength": 1, "maxLength": 40},
    "enums": {"enum": ["north", "east", "south", "west", "northwest", "southeast"]},
    "numbers": {"type": "number", "minimum": -1000, "maximum": 1000},
    "nested arrays": {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}},
}
SCHEMAS = [{"type": "array", "items": item, "minItems": 500} for item in ITEMS.values()]
PROMPT = "Here is some data about the weather in several towns, written as JSON:"


def params(kind: str, row: int, num_tokens: int, temperature: float) -> SamplingParams:
    """Return the parameters of one row of a batch: "free", "half" or "all"."""
    is_structured = kind == "all" or (kind == "half" and row % 2 == 0)
    wanted = {"json": SCHEMAS[row // (2 if kind == "half" else 1) % len(SCHEMAS)]} if is_structured else None
    return SamplingParams(
        max_tokens=num_tokens, ignore_eos=True, temperature=temperature, seed=row, structured_outputs=wanted
    )


def speeds(engine: Engine, num_rows: int, temperature: float, runs: int, num_tokens: int) -> dict[str, Any]:
    """Return the output tokens per second of the three batches, and their ratios to free text."""
    kinds = ["free", "all"] if num_rows == 1 else ["free", "half", "all"]
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    prompts = [f"{PROMPT} {row}" for row in range(num_rows)]
    for index in range(runs + 1):
        for kind in kinds:
            each = [params(kind, row, num_tokens, temperature) for row in range(num_rows)]
            engine.reset_prefix_cache()
            start_s = time.perf_counter()
            outputs = engine.generate(prompts, each, use_tqdm=False)
            taken_s = time.perf_counter() - start_s
            assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs), "an output is shorter"
            if index:  # The first ones compile.
                times[kind].append(taken_s)
    rates = {kind: num_rows * num_tokens / statistics.median(values) for kind, values in times.items()}
    # Each run is compared with the free text that ran just before: the machine's speed drifts.
    ratios = {
        kind: statistics.median(free / own for free, own in zip(times["free"], values, strict=True))
        for kind, values in times.items()
    }
    return {"tokens_per_s": rates, "speed ÷ free": ratios}


def schema_of_2kb(number: int) -> dict[str, Any]:
    """Return a schema of about 2 KB, different for each number."""
    person = {
        "type": "object",
        "properties": {
            f"first{number}": {"type": "string", "maxLength": 40},
            "born": {"type": "string", "format": "date"},
            "email": {"type": "string", "pattern": "^[a-z.]+@[a-z]+\\.(com|org)$"},
            "role": {"enum": ["admin", "editor", "viewer", "guest"]},
            "score": {"type": "number", "minimum": 0, "maximum": 100},
        },
        "required": [f"first{number}", "role"],
        "additionalProperties": False,
    }
    names = [f"group{index}" for index in range(4)]
    return {
        "$defs": {name: {**person, "title": f"A person of {name}"} for name in names},
        "type": "object",
        "properties": {name: {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "maxItems": 5} for name in names},
        "required": names,
        "additionalProperties": False,
    }


def first_tokens(engine: Engine, runs: int) -> dict[str, Any]:
    """Return the milliseconds to the first token: free, with a schema seen before, with a new one."""
    times: dict[str, list[float]] = {"free": [], "seen": [], "new": []}

    def run(wanted: dict[str, Any] | None) -> float:
        engine.reset_prefix_cache()
        one = SamplingParams(max_tokens=1, temperature=0, structured_outputs=wanted)
        return seconds(lambda: engine.generate([PROMPT], one, use_tqdm=False))

    for index in range(runs + 1):
        schema = {"json": schema_of_2kb(index)}
        taken = {"free": run(None), "new": run(schema), "seen": run(schema)}
        if index:
            for name, taken_s in taken.items():
                times[name].append(1e3 * taken_s)
    found: dict[str, Any] = {f"{name}_ms": statistics.median(values) for name, values in times.items()}
    for name in ("seen", "new"):
        differences = [with_ - without for with_, without in zip(times[name], times["free"], strict=True)]
        found[f"{name} - free, ms"] = statistics.median(differences)
    return {"schema_bytes": len(json.dumps(schema_of_2kb(0))), **found}


def mask_times(directories: Iterable[Path], engine: Engine) -> list[dict[str, Any]]:
    """Return, for each tokenizer, the seconds of its tables and the microseconds of a mask by schema."""
    handle = engine.handle
    models = [(MODEL, handle.tokenizer, handle.spec.vocab_size, handle.eos_token_ids)]
    for path in directories:
        tokenizer = load_tokenizer(path)
        ends = {tokenizer.eos_token_id} - {None}
        models.append((path.name, tokenizer, tokenizer.vocab_size, ends))
    rng, found = np.random.default_rng(0), []
    for name, tokenizer, vocab_size, ends in models:
        grammars = Grammars(tokenizer, vocab_size, ends)
        start_s = time.perf_counter()
        grammars.grammar_of(StructuredOutputsParams(choice=["yes"]))
        row: dict[str, Any] = {"tokenizer": name, "ids": vocab_size, "tables_s": time.perf_counter() - start_s}
        for kind, schema in zip(ITEMS, SCHEMAS, strict=True):
            matcher, times = grammars.matcher(grammars.grammar_of(StructuredOutputsParams(json=schema))), []
            for _ in range(300):
                start_s = time.perf_counter()
                mask = grammars.masks([matcher])
                times.append(1e6 * (time.perf_counter() - start_s))
                allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")[:vocab_size])
                if matcher.advance(int(rng.choice(allowed))):
                    break
            row[kind] = {"median_us": statistics.median(times), "p99_us": float(np.percentile(times, 99))}
        found.append(row)
    return found


BAD: list[dict[str, Any]] = [
    {"json": {"type": "string", "allOf": [{"pattern": f"a.{{{n}}}b"} for n in range(6)]}},
    {"json": {"allOf": [{"anyOf": [{"required": [f"a{n}"]}, {"required": [f"b{n}"]}]} for n in range(16)]}},
    {"json": {"type": "integer", "multipleOf": 999999937}},
    {"regex": "(?=a)b"},
    {"grammar": "start: missing"},
    {"json": {"not": {}}},
    {"json": {"type": "object", "properties": {f"p{n}": {"type": "string", "pattern": "(a|b)*c"} for n in range(900)}}},
]


def stalls(engine: Engine, num_tokens: int) -> dict[str, Any]:
    """Return how long steps of eight streams take, alone and while another thread asks for bad grammars."""
    streams = [SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=1, seed=row) for row in range(8)]

    def run() -> tuple[list[float], list[tuple[int, ...]]]:
        engine.reset_prefix_cache()
        for row, one in enumerate(streams):
            engine.add_request(f"stream-{row}", f"{PROMPT} {row}", one)
        times, tokens = [], {}
        while engine.has_unfinished_requests():
            start_s = time.perf_counter()
            outputs = engine.step()
            times.append(time.perf_counter() - start_s)
            tokens |= {output.request_id: output.outputs[0].token_ids for output in outputs if output.finished}
        return times, [tokens[name] for name in sorted(tokens)]

    run()
    alone, expected = run()
    is_over, num_refused = threading.Event(), 0

    def ask() -> None:
        nonlocal num_refused
        while not is_over.is_set():
            for wanted in BAD:
                try:
                    engine.add_request("bad", PROMPT, SamplingParams(max_tokens=4, structured_outputs=wanted))
                except InvalidRequestError:
                    num_refused += 1
                else:
                    engine.abort_request("bad")
            time.sleep(0.05)

    asking = threading.Thread(target=ask)
    asking.start()
    beside, found = run()
    is_over.set()
    asking.join()

    def shares(times: list[float]) -> dict[str, float]:
        median_s = statistics.median(times)
        return {"median_ms": 1e3 * median_s, "p95 ÷ median": float(np.percentile(times, 95)) / median_s}

    return {
        "alone": shares(alone),
        "beside bad requests": shares(beside),
        "refused": num_refused,
        "same tokens": found == expected,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--tokenizers", type=Path, nargs="*", default=[], help="directories of further tokenizers")
    args = parser.parse_args()
    with Engine(MODEL, dtype=args.dtype, num_decode_steps=1, max_num_seqs=max(args.rows), max_model_len=1024) as engine:
        report: dict[str, Any] = {"model": MODEL, "dtype": args.dtype, "processor": processor()}
        report["schemas"] = dict(zip(ITEMS, SCHEMAS, strict=True))
        for temperature in (0.0, 1.0):
            for num_rows in args.rows:
                name = f"{num_rows} rows at temperature {temperature:g}"
                report[name] = speeds(engine, num_rows, temperature, args.runs, args.tokens)
                print(name, json.dumps(report[name]), file=sys.stderr, flush=True)
        report["first token"] = first_tokens(engine, 3 * args.runs)
        report["masks"] = mask_times(args.tokenizers, engine)
        report["steps"] = stalls(engine, 4 * args.tokens)
        report["recompiles"] = engine.stats()["recompiles"]
    print(json.dumps(report, indent=2, ensure_ascii=False))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return int(report["recompiles"] > 0)


if __name__ == "__main__":
    sys.exit(main())
