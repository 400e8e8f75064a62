"""A run on Ray as its driver sees it: an engine that computes the messages of a run on the workers of a cluster.

    messages ─▶ blocks of 32 ─▶ Ray Data's map_batches ─▶ Worker, in an actor ─▶ results, as blocks end

The driver opens no device. It keeps each message until its result is there: Ray drops the blocks of actors that were
lost too often, and with each also blocks that only were beside it. Their lines are computed once more, each by itself.
"""

from __future__ import annotations

import logging
import time
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow
import ray
from ray.exceptions import RayError

from .. import codec
from ..checks import one_line, refusal, shown
from ..errors import ConfigError, EngineStoppedError
from ..intake.request_builder import RequestBuilder
from ..messages import NewRequest
from ..outputs import ClusterSummary, LastOutput, RequestOutput, SampleDelta, error_output
from ..text.parsed_outputs import OutputParser
from .blocks import BLOCK_REQUESTS, RequestBlock, ResultBlock
from .cluster_answer import FLAG
from .ray_options import RESOURCES_FLAG
from .worker import COLUMN, Worker, WorkerSpec
from .worker_plan import WorkerPlan

logger = logging.getLogger("jpaged")

MAX_TASK_RETRIES = 2
"""How often Ray gives the task of a lost actor to another one."""
NAMED_RESOURCES = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Ray's resources that have arguments of their own."""
NO_RESULT = "each worker that computed this request was lost"


class RayEngine:
    """What computes a run, as `MessageEngine` says it. The process is a driver of Ray by now."""

    def __init__(self, plan: WorkerPlan, spec: WorkerSpec, builder: RequestBuilder):
        """`builder` makes messages for engines of `builder.sizes.max_num_seqs` sequences.

        Raise ConfigError for resources that Ray does not reserve.
        """
        self.builder = builder
        self._plan, self._spec = plan, spec
        self._remote_args = remote_args(plan.resources)
        self._nodes: set[str] = set()
        self._start_s = 0.0
        self._num_prompt_tokens = self._num_output_tokens = 0

    def output_parser(self) -> OutputParser:
        """Return what reads the outputs of the model."""
        return self.builder.output_parser()

    def checked_message(self, new: NewRequest) -> NewRequest:
        """Return a message as it is: whether its request can fit is known where it is computed."""
        return new

    def run_messages(
        self, messages: Iterable[NewRequest | None], *, stream: Callable[[list[SampleDelta]], None] | None = None
    ) -> Iterator[LastOutput]:
        """Read all messages, compute their requests, and yield the last output of each; there are no deltas.

        Raise EngineStoppedError if a worker cannot start, or if Ray ends the run.
        """
        missing = {new.request_id: new for new in messages if new is not None}
        tasks_at_once = -(-2 * self.builder.sizes.max_num_seqs // BLOCK_REQUESTS)
        yield from self._outputs(missing, BLOCK_REQUESTS, tasks_at_once)
        if missing:
            logger.warning("%d lines have no result, since workers were lost; they run once more", len(missing))
            yield from self._outputs(missing, 1, 1)
        for new in missing.values():
            yield LastOutput(error_output(new.request_id, new.prompt, NO_RESULT))

    def _outputs(self, missing: dict[str, NewRequest], block_size: int, tasks_at_once: int) -> Iterator[LastOutput]:
        """Compute what is missing in blocks, and yield and take out what has a result."""
        left = list(missing.values())
        blocks = [left[start : start + block_size] for start in range(0, len(left), block_size)]
        for result in self._results(blocks, tasks_at_once):
            for output in result.outputs_here():
                if (new := missing.pop(output.request_id, None)) is not None:
                    yield LastOutput(self._whole(output, new))

    def _results(self, blocks: Sequence[Sequence[NewRequest]], tasks_at_once: int) -> Iterator[ResultBlock]:
        """Yield the result of each block as it comes; none of a block that Ray has dropped."""
        start = time.monotonic()
        num_workers = min(self._plan.num_workers, len(blocks))
        tasks_at_once = min(tasks_at_once, -(-len(blocks) // num_workers))  # Each worker gets its part.
        data_context = ray.data.DataContext.get_current()
        data_context.max_errored_blocks = -1
        data_context.max_consecutive_actor_init_deaths = MAX_TASK_RETRIES
        data_context.enable_progress_bars = data_context.print_on_execution_start = False
        # The warning says that Ray 2.64 takes no `max_task_retries`, for which nothing else stands.
        warnings.filterwarnings("ignore", "`ray_remote_args` is deprecated")
        tables = [_table(codec.encode(RequestBlock.of(block))) for block in blocks]
        results = ray.data.from_arrow(tables).map_batches(
            Worker,
            fn_constructor_args=(self._spec,),
            batch_size=1,  # A table has one row. None is refused beside GPUs.
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(
                size=num_workers,
                max_tasks_in_flight_per_actor=tasks_at_once,
                max_concurrent_calls_per_actor=tasks_at_once,
            ),
            max_task_retries=MAX_TASK_RETRIES,
            **self._remote_args,
        )
        try:
            for table in results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                for data in table.column(COLUMN).to_pylist():
                    result = codec.decode(data, ResultBlock)
                    if result.problem:
                        raise EngineStoppedError(f"{FLAG}: on the node {result.node}: {result.problem}")
                    self._start_s = self._start_s or max(0.0, time.monotonic() - start - result.computed_s)
                    self._nodes.add(result.node)
                    yield result
        except RayError as error:
            raise EngineStoppedError(f"{FLAG}: {type(error).__name__}: {one_line(error)}") from error

    def _whole(self, output: RequestOutput, new: NewRequest) -> RequestOutput:
        """Return an output with its prompt, and count it."""
        self._num_prompt_tokens += new.num_prompt_tokens
        self._num_output_tokens += sum(len(one.token_ids) for one in output.outputs)
        token_ids = tuple(array("i", new.prompt_token_ids))
        return replace(output, prompt=new.prompt, prompt_token_ids=token_ids)

    def stats(self) -> dict[str, Any]:
        """Return the seconds before the first worker was ready, which compile too."""
        return {"compile_seconds": self._start_s}

    def summary(self) -> ClusterSummary:
        """Return what the workers were, and what they have done."""
        return ClusterSummary(
            num_workers=self._plan.num_workers,
            resources=dict(self._plan.resources),
            nodes=sorted(self._nodes),
            start_s=self._start_s,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
        )


def _table(data: bytes) -> pyarrow.Table:
    return pyarrow.table({COLUMN: pyarrow.array([data], pyarrow.large_binary())})


def remote_args(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return the arguments by which Ray reserves these resources for a worker.

    Raise ConfigError for amounts that Ray does not reserve, such as 3 chips of a TPU.
    """
    named = {NAMED_RESOURCES[name]: amount for name, amount in resources.items() if name in NAMED_RESOURCES}
    others = {name: amount for name, amount in resources.items() if name not in NAMED_RESOURCES}
    arguments = {"num_cpus": 0, **named, "resources": others}
    try:
        ray.remote(**arguments)(Worker)
    except ValueError as error:
        allowed = f"what Ray reserves ({one_line(error)})"
        raise refusal(RESOURCES_FLAG, shown(dict(resources)), allowed, error=ConfigError) from error
    return arguments
