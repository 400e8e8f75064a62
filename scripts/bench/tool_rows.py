"""Measures what forced tool calls cost the other rows of a step, and how much later a turn with tools is queued.

A part of `serving.py`: an engine of this process, the built-in model's shapes with random weights, and
`num_decode_steps=1`, as in a server with a stream.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

from served_process import ANSWERS_TEMPLATE

from jpaged import Engine, SamplingParams
from jpaged.commands.progress import say

NUM_ROWS, NUM_TOKENS = 16, 32
NUM_TOOLS = 16
NUM_TURNS = 40


def tools(count: int, *, is_strict: bool = False) -> list[dict[str, Any]]:
    """Return so many tools with four parameters each; the text in one of them outlasts an answer."""
    properties = {
        "path": {"type": "string", "minLength": 4096}, "line": {"type": "integer"},
        "mode": {"enum": ["read", "write"]}, "tags": {"type": "array", "items": {"type": "string"}},
    }  # fmt: skip
    parameters = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False
    }  # fmt: skip
    return [
        {"type": "function", "function": {"name": f"tool_{number}", "strict": is_strict, "parameters": parameters}}
        for number in range(count)
    ]


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def measure_tool_rows(num_runs: int) -> dict[str, Any]:
    """Return the speed of rows beside forced calls, by that of rows alone, and the delay of turns with tools."""
    sizes = {"max_num_seqs": NUM_ROWS, "max_model_len": 4096, "max_num_batched_tokens": 2048, "num_blocks": 4097}
    with Engine(load_format="dummy", num_decode_steps=1, block_size=16, **sizes) as engine:
        engine.builder.encoder = replace(engine.builder.encoder, chat_template=ANSWERS_TEMPLATE)
        report = {"rows": _measure_rows(engine, num_runs), "second_turn": _measure_turns(engine)}
    say(f"rows beside calls: {report}")
    return report


def _measure_rows(engine: Engine, num_runs: int) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    plain = [chat(f"Tell me of the number {number}.") for number in range(NUM_ROWS)]
    forced = {"tools": tools(4), "tool_choice": "required"}
    half = [chat(one["messages"][0]["content"], **forced) if row % 2 else one for row, one in enumerate(plain)]
    speeds: dict[str, list[float]] = {"plain": [], "half": []}
    found: dict[str, list[Any]] = {}
    for run in range(num_runs + 1):
        for name, prompts in (("plain", plain), ("half", half)):
            outputs = engine.generate(prompts, params, use_tqdm=False)
            times = [one.metrics for one in outputs]
            seconds = max(one.finished_time for one in times) - max(one.first_token_time for one in times)
            num_tokens = sum(len(one.outputs[0].token_ids) - 1 for one in outputs)
            if run:  # The first one compiles.
                speeds[name].append(num_tokens / seconds)
            found[name] = [one.outputs[0].token_ids for one in outputs[::2]]
    if found["plain"] != found["half"]:
        raise RuntimeError("rows beside calls have other tokens")
    plain_speed, half_speed = (statistics.median(speeds[name]) for name in ("plain", "half"))
    return {
        "tokens_per_s": {"plain": round(plain_speed, 1), "half": round(half_speed, 1)},
        "ratio": round(statistics.median(b / a for a, b in zip(speeds["plain"], speeds["half"], strict=True)), 3),
    }


def _measure_turns(engine: Engine) -> dict[str, Any]:
    """Return what the turns of a chat with tools take until their first step, and those without, in milliseconds.

    `build` is the processor time that checks and renders a turn, and finds its grammar; `first_step` is the time on the
    clock up to the first step of the turn, which compiles the grammar unless it is kept.
    """
    params = SamplingParams(temperature=0, max_tokens=1)
    cases = {"without": {}, "with": {"tools": tools(NUM_TOOLS, is_strict=True)}}
    build_ms: dict[str, list[float]] = {name: [] for name in cases}
    first_step_ms: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(NUM_TURNS + 1):
        for name, fields in cases.items():
            prompt = chat(f"Turn {turn}. " * 20, **fields)
            start_cpu_s = time.thread_time()
            engine.builder.build("", prompt, params, number=0)
            cpu_s, start_s = time.thread_time() - start_cpu_s, time.monotonic()
            (output,) = engine.generate([prompt], params, use_tqdm=False)
            if turn:
                build_ms[name].append(1e3 * cpu_s)
                first_step_ms[name].append(1e3 * (output.metrics.first_scheduled_time - start_s))
    report = {}
    for name, values in (("build", build_ms), ("first_step", first_step_ms)):
        medians = {case: round(statistics.median(one), 2) for case, one in values.items()}
        report[name] = {**medians, "later": round(medians["with"] - medians["without"], 2)}
    return report
