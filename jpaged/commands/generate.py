"""`jpaged generate`: complete prompts from the command line or a file.

Everything that can be wrong with flags, prompts and the model's files is found before weights are loaded. Exit status:
0 if every request succeeded, 1 if the run could not start (one line on stderr, no output file) or could not go on (a
full disk), 3 if some requests failed, 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import astuple, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import refusal, sent_as
from ..errors import ConfigError
from ..sampling.sampling_params import BeamSearchParams, SamplingParams
from .files.generate_run import GenerateRun
from .files.jobs import Job, JobReader, read_prompts
from .files.lines import LineSource, stat_of
from .files.results import ResultFile
from .files.resume import FinishedRecords, options_key
from .files.run import Printer
from .files.whole_run import compute_and_summarize
from .flags import FLAG_NAMES, SAMPLING_DEFAULTS, beam_flags, engine_config, parse_generate, sampling_flags
from .process import EXIT_SOME_FAILED, garbage_uncollected, interrupts_held, run_command
from .progress import ProgressReport
from .summary import SamplingSummary
from .template_file import read_template

if TYPE_CHECKING:
    from ..cluster.ray_options import RayOptions
    from ..config.engine_config import EngineConfig
    from ..engine import Engine
    from ..remote.message_run import MessageRun
    from ..sampling.sampling_params import SampleMode
    from ..startup.open_model import ModelHandle
    from ..startup.sizing.sizes import Demand
    from ..text.prompts import PromptEncoder
    from .files.run import MessageEngine

HEAD_JOBS = 1000
"""Jobs that are read before the engine is started; they decide its sizes and which programs it compiles first."""
MAX_WAIT_S = 1.0
"""Seconds after a pipe's first job in which the start waits for further lines, to size the engine by them too."""
CORE_RESTARTS = 10
"""How often each core process is started again in a run. A line that ends cores ends three of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jpaged generate` with the arguments `argv`, by default the process's own; return its exit status."""
    return run_command(_run, sys.argv[1:] if argv is None else argv)


def _run(argv: list[str]) -> int:
    """Run the command: check flags, prompts and model, read the first jobs, start an engine for them, run all jobs.

    Returns 0, or EXIT_SOME_FAILED if some requests failed. No engine is started if no job is left to run, because every
    line has a result already, from an earlier run or as an error. The output file and the input are closed in any case.
    Raises ConfigError, or InvalidRequestError for a prompt of the command line, if the run cannot start.
    """
    args = parse_generate(argv)
    config = engine_config(args)
    flags, beams = sampling_flags(args), beam_flags(args)
    _check_flags(args, flags, beams)
    cluster = _ray_options(args, config)
    if config.data_parallel_size > 1 and cluster is None:
        _check_machine(config)
    prompts = read_prompts(args)
    prompt_file = None if args.prompt_file is None else stat_of(args.prompt_file)
    results = None if args.output is None else ResultFile(Path(args.output), prompt_file=prompt_file)
    template = None if args.chat_template is None else read_template(args.chat_template)
    lines = None if args.prompt_file is None else LineSource(args.prompt_file)
    with closing(lines) if lines else nullcontext(), closing(results) if results else nullcontext():
        with garbage_uncollected():
            with interrupts_held():  # This imports JAX, which would crash if an interrupt came during the import.
                from ..startup.open_model import open_model

            handle = open_model(config)
        reader = _job_reader(args, config, handle, flags, beams, template)
        options = _options_key(config, handle, reader, "arguments" if lines is None else lines.format)
        finished = FinishedRecords(results.path, options) if results and args.resume else None
        reader = replace(reader, finished=finished)
        printer = Printer(is_json=args.json) if args.json or results is None else None
        run = GenerateRun(results, printer, finished, options)
        items = reader.argument_jobs(prompts) if lines is None else reader.file_jobs(lines)
        jobs = run.jobs(items, are_read_first=cluster is not None)
        head, is_whole = _read_head(jobs, lines) if cluster is None else (_read_all(jobs), True)
        if not run.num_lines:
            raise ConfigError(f"--prompt-file: {args.prompt_file} holds no prompt; give at least one line")
        if printer is not None and is_whole and run.num_lines == 1:
            params = head[0].params if head else None
            has_one_sample = isinstance(params, SamplingParams) and params.n == 1
            printer.expect_no_more(is_streamed=has_one_sample and cluster is None)
        if head:
            starting: AbstractContextManager[MessageEngine]
            if cluster is None:
                starting = _start_engine(config, handle, head, is_whole=is_whole)
            else:
                starting = _join_cluster(cluster, config, handle, reader.encoder, head)
            with starting as engine:
                compute_and_summarize(run, engine, head, jobs, lines, SamplingSummary(flags, handle.sampling_defaults))
        else:
            run.start()
        run.finish()
    return EXIT_SOME_FAILED if run.num_failed else 0


def _check_flags(args: argparse.Namespace, flags: Mapping[str, Any], beams: Mapping[str, Any] | None) -> None:
    """Raise ConfigError or InvalidRequestError for flags that are wrong with any model. The model is not open yet.

    `flags` are the sampling parameters among the flags, `beams` those of beam search or None.
    """
    with sent_as(FLAG_NAMES):
        SamplingParams(**flags)  # Checks the values.
    if beams is not None:
        BeamSearchParams(**{"max_tokens": None, **beams})
    if args.resume and args.output is None:
        raise ConfigError("--resume: needs --output F, the file to go on with")
    for name in ("logprobs", "prompt_logprobs"):
        if name in flags and args.output is None and not args.json:
            raise ConfigError(f"--{name.replace('_', '-')}: is not shown in plain text; add --json or --output F")
    if sys.stdout is None and (args.json or args.output is None):
        raise refusal("stdout", "a closed one", "an open one", "give --output F instead", error=ConfigError)


def _ray_options(args: argparse.Namespace, config: EngineConfig) -> RayOptions | None:
    """Return where the run goes, None without `--ray`. Raise ConfigError for wrong flags, or if no cluster answers."""
    if args.ray is None:
        if args.ray_resources is not None:
            raise ConfigError("--ray-resources: has no effect without --ray; add that or leave it out")
        return None
    if config.count_expert_tokens:
        raise ConfigError("--count-expert-tokens: has no effect with --ray; leave one of them out")
    from ..cluster.ray_options import ray_options

    return ray_options(args.ray, getattr(args, "data_parallel_size", None), args.ray_resources)


def _read_all(jobs: Iterator[Job | None]) -> deque[Job]:
    """Return all jobs of the input, after waiting for a pipe's end."""
    return deque(job for job in jobs if job is not None)


def _read_head(jobs: Iterator[Job | None], lines: LineSource | None) -> tuple[deque[Job], bool]:
    """Return the first jobs, which decide the sizes of the engine, and whether they are all jobs of the input.

    At most HEAD_JOBS are read. From a pipe, only those are read that come within MAX_WAIT_S of the first; before the
    first job there is no time limit. A None among the jobs means that the next is not there yet, and ends the reading
    once there is a job. The deque is empty if the input has no job, and the second value is then true.
    """
    head: deque[Job] = deque()
    end: float | None = None

    def seconds_left() -> float | None:
        """Return how long to wait for a further line; None before the first job: as long as it takes."""
        return None if end is None else max(0.0, end - time.monotonic())

    if lines is not None:
        lines.wait_for(seconds_left)
    is_pipe = lines is not None and lines.is_pipe
    for job in jobs:
        if job is None and head:
            return head, False
        if job is None:
            continue
        head.append(job)
        end = end or time.monotonic() + MAX_WAIT_S  # Set by the first job.
        if len(head) == HEAD_JOBS or (is_pipe and seconds_left() == 0):
            return head, False
    return head, True


def _job_reader(
    args: argparse.Namespace,
    config: EngineConfig,
    handle: ModelHandle,
    flags: Mapping[str, Any],
    beams: Mapping[str, Any] | None,
    template: str | None,
) -> JobReader:
    """Return the reader that turns prompts and lines into checked jobs.

    Text prompts become chat messages if there is a chat template, in the model or as `template` (the text of
    `--chat-template`), and `--no-chat` is not given. `flags` take precedence over the model's sampling defaults;
    `beams` are the parameters of beam search or None. Raises ConfigError if a chat flag has no effect or lacks a
    template.
    """
    from ..sampling.logit_rules_spec import LogitRulesSpec
    from ..startup.sizing.sizes import requested_max_len, requested_max_seqs

    has_template = template is not None or (handle.tokenizer is not None and handle.tokenizer.has_chat_template)
    if args.chat and not has_template:
        raise ConfigError("--chat: the model has no chat template; give --chat-template F, or leave it out")
    use_chat = has_template if args.chat is None else args.chat
    if template is not None and not use_chat:
        raise ConfigError("--chat-template: has no effect with --no-chat; leave one of them out")
    if args.system is not None and not use_chat:
        raise ConfigError("--system: needs a chat template; give --chat-template F, or put it into the prompt")
    rules_spec = LogitRulesSpec(handle.spec.vocab_size)
    return JobReader(
        encoder=handle.prompt_encoder(config, rules_spec, requested_max_len(config, handle.spec), template),
        beams=beams,
        defaults={**handle.sampling_defaults, **flags},
        max_logprobs=config.max_logprobs,
        max_num_seqs=requested_max_seqs(config),
        scheduling_policy=config.scheduling_policy,
        use_chat=use_chat,
        system=args.system,
    )


def _options_key(config: EngineConfig, handle: ModelHandle, reader: JobReader, line_format: str) -> str:
    """Return a hash of all options that results depend on: the model, the chat template, the sampling parameters.

    `--resume` only takes over results with the same key. `line_format` is "arguments" for prompts of the command line,
    else "txt" or "jsonl"; the same line means different prompts in these. Sampling parameters are those that hold for a
    line without its own; a line's own are part of the line, whose digest is compared too.
    """
    source, tokenizer, beams = handle.source, handle.tokenizer, reader.beams
    assert source is not None, "a command serves models from files"
    structure = reader.defaults.get("structured_outputs")
    template = reader.encoder.chat_template or (tokenizer.chat_template if tokenizer is not None else None)
    return options_key(
        {
            "model": source.identity,
            "has_random_weights": config.load_format == "dummy",
            "tokenizer": config.tokenizer,
            "hf_overrides": config.hf_overrides,
            "logprobs_mode": config.logprobs_mode,
            "sampling": {**SAMPLING_DEFAULTS, **reader.defaults, "structured_outputs": structure and vars(structure)},
            "beams": None if beams is None else vars(BeamSearchParams(**{"max_tokens": None, **beams})),
            "use_chat": reader.use_chat,
            "system": reader.system,
            "template": template,
            "format": line_format,
            **{name: value for name in ("tool_call_parser", "reasoning_parser") if (value := getattr(config, name))},
        }
    )


def _check_machine(config: EngineConfig) -> None:
    """Raise ConfigError if several cores have no devices here, or the package that they need is missing."""
    from ..async_engine import check_core
    from ..remote.machine_share import machine_shares

    check_core("process", config.data_parallel_size)
    machine_shares(config)


@contextmanager
def _join_cluster(
    options: RayOptions, config: EngineConfig, handle: ModelHandle, encoder: PromptEncoder, jobs: Sequence[Job]
) -> Iterator[MessageEngine]:
    """Join a cluster of Ray during a `with`, with what computes these jobs, all of the run, on its workers."""
    from ..cluster.driver import cluster_engine

    first = list(islice(jobs, HEAD_JOBS))
    core_options = _core_options(*_needs(first, is_whole=len(first) == len(jobs)))
    num_samples = max(job.params.n for job in jobs)
    with cluster_engine(options, config, handle, encoder, core_options, num_samples=num_samples) as engine:
        yield engine


def _start_engine(
    config: EngineConfig, handle: ModelHandle, jobs: Collection[Job], *, is_whole: bool
) -> Engine | MessageRun:
    """Start an engine, or core processes, with the pages that these jobs need; they compile what these need first.

    Progress goes to stderr; the caller closes what is returned. See `_needs` for `is_whole`.
    """
    demands, modes = _needs(jobs, is_whole=is_whole)
    with closing(ProgressReport()) as progress:
        if config.data_parallel_size > 1:
            return _start_cores(config, demands, modes, progress)
        with garbage_uncollected():
            from ..engine import Engine

        return Engine.from_engine_args(
            config, handle, demands=demands, modes=modes, progress=progress, keeps_programs=True
        )


def _needs(jobs: Collection[Job], *, is_whole: bool) -> tuple[list[Demand], set[SampleMode]]:
    """Return what an engine needs for these jobs: pages and programs of each, and the ways in which they sample.

    If the jobs are not the whole input (`is_whole` false), it is as if HEAD_JOBS came: these jobs, repeated in order. A
    demand is the prompt's tokens, the most output tokens (None: up to the context length) and the number of samples.
    """
    with garbage_uncollected():
        from ..sampling.sampling_params import sample_mode
        from ..startup.sizing.sizes import Demand

    demands = [
        Demand(len(job.prompt.token_ids), job.params.max_tokens, job.params.n, bool(job.checked.grammar))
        for job in jobs
    ]
    if not is_whole:
        demands = list(islice(cycle(demands), HEAD_JOBS))
    return demands, {sample_mode(job.params) for job in jobs}


def _start_cores(
    config: EngineConfig, demands: Sequence[Demand], modes: Collection[SampleMode], progress: ProgressReport
) -> MessageRun:
    """Start core processes for these demands, each of which may get all of them."""
    from ..remote.core_client import GivenNames
    from ..remote.core_group import CoreGroup
    from ..remote.message_run import MessageRun

    options = _core_options(demands, modes)
    group = CoreGroup(config, num_restarts=CORE_RESTARTS, options=options, progress=progress, names=GivenNames())
    return MessageRun(group)


def _core_options(demands: Sequence[Demand], modes: Collection[SampleMode]) -> dict[str, Any]:
    """Return what makes the engine of a core process for these demands: the options of `make_engine`."""
    return {
        "demands": [astuple(demand) for demand in demands],
        "modes": [mode.value for mode in modes],
        "keeps_programs": True,
    }
