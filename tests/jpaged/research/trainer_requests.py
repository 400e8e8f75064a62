"""The requests of this folder's tests, two sets of weights, and what engines with either draw."""

from itertools import count
from typing import Any

from jpaged import Engine, RequestOutput, SamplingParams

from ..tiny_model import tensors

OLD, NEW = tensors(0), tensors(1)
PROMPTS = [[index + 2] * (20 + index) for index in range(6)]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=0)
IDS = [f"request {index}" for index in range(len(PROMPTS))]


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    """Return the tokens of each output's first sample."""
    return [output.outputs[0].token_ids for output in outputs]


def begin(engine: Engine, num_steps: int = 3) -> dict[str, RequestOutput]:
    """Queue all requests, and compute some steps; return their outputs by id."""
    for request_id, prompt in zip(IDS, PROMPTS, strict=True):
        engine.add_request(request_id, prompt, PARAMS)
    return step(engine, num_steps)


def step(engine: Engine, num_steps: int | None = None) -> dict[str, Any]:
    """Compute so many steps, or all; return the last output of each request by its id."""
    found: dict[str, Any] = {}
    for index in count():
        if index == num_steps or not engine.has_unfinished_requests():
            break
        found |= {output.request_id: output for output in engine.step()}
    return found
