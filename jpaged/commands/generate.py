"""`jpaged generate`: complete prompts from the command line or a file.

Everything that can be wrong with flags, prompts and the model's files is found before weights are loaded. Exit status:
0 if every request succeeded, 1 if the run could not start (one line on stderr, no output file), 3 if some requests
failed, 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import one_line
from ..errors import ConfigError, InvalidRequestError, JpagedError, ModelLoadError
from ..sampling.sampling_params import FIELDS, BeamSearchParams, SamplingParams
from ..startup.device_memory import reserve_device_memory
from .flags import beam_flags, engine_config, parse_generate, sampling_flags
from .jobs import BadLine, Job, JobReader, error_record, read_prompts
from .progress import ProgressReport, say, seconds_since_start
from .results import ResultFile, dump_line, output_record

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..engine import Engine
    from ..request import Request
    from ..startup.open_model import ModelHandle

EXIT_BAD_START = 1
EXIT_SOME_FAILED = 3
EXIT_INTERRUPTED = 130
SHOWN_PARAMS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
"""Sampling parameters that the summary always shows; it shows the others if they differ from the default."""
_DEFAULTS = {name: getattr(SamplingParams(max_tokens=None), name) for name in FIELDS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # A character that stdout cannot encode must not end the run.
    reserve_device_memory()
    try:
        return _run(parse_generate(list(sys.argv[1:] if argv is None else argv)))
    except (JpagedError, ModelLoadError) as error:
        say(f"error: {one_line(error, 10_000)}")
        return EXIT_BAD_START
    except KeyboardInterrupt:
        say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # The reader of stdout has closed it, as `| head` does.
        sys.stdout = None  # type: ignore[assignment]
        return EXIT_BAD_START
    except OSError as error:  # A full disk, a device that went away.
        say(f"error: {error}; an output file keeps every finished request: go on with --resume")
        return EXIT_BAD_START


def _run(args: argparse.Namespace) -> int:
    """Check everything, start an engine for the jobs without a result, run them; return the exit status."""
    config = engine_config(args)
    flags = sampling_flags(args)
    SamplingParams(**flags)  # Wrong flags are refused before the model is opened.
    beams = beam_flags(args)
    if beams is not None:
        BeamSearchParams(**{"max_tokens": None, **beams})
    prompts = read_prompts(args)
    if args.resume and args.output is None:
        raise ConfigError("--resume: needs --output F, the file to go on with")
    for name in ("logprobs", "prompt_logprobs"):
        if name in flags and args.output is None and not args.json:
            raise ConfigError(f"--{name.replace('_', '-')}: is not shown in plain text; add --json or --output F")
    prompt_file = None if args.prompt_file is None else Path(args.prompt_file)
    results = None if args.output is None else ResultFile(Path(args.output), prompt_file=prompt_file)
    template = None if args.chat_template is None else _template(args.chat_template)

    from ..startup.open_model import open_model

    handle = open_model(config)
    jobs = _jobs(args, config, handle, prompts, flags, beams, template)
    records, num_others = results.finished_records(jobs) if results and args.resume else ({}, 0)
    missing = [job for job in jobs if isinstance(job, Job) and job.number not in records]
    if args.resume:
        others = f"; {num_others} of other prompts are dropped" if num_others else ""
        say(f"resume: {len(records)} of {len(jobs)} are there already{others}")
    for job in jobs:
        if isinstance(job, BadLine):
            say(f"error: {job.id}: {job.error}")
            records[job.number] = error_record(job.id, job.error)
    run = _Run(jobs, records, results, args.json)
    if missing:
        run.compute(_start_engine(config, handle, missing), missing, _effective(missing, flags, handle))
    run.finish()
    return EXIT_SOME_FAILED if any("error" in record for record in records.values()) else 0


class _Run:
    """The results of one command, and where they go: a file, JSON lines on stdout, or plain text on stdout."""

    def __init__(
        self, jobs: list[Job | BadLine], records: dict[int, dict[str, Any]], results: ResultFile | None, is_json: bool
    ):
        """`records` are the results that exist already, by the numbers of their jobs."""
        self.jobs, self.records, self.results, self.is_json = jobs, records, results, is_json
        self.is_text = not is_json and results is None
        only = jobs[0] if len(jobs) == 1 else None
        has_one_sample = isinstance(only, Job) and isinstance(only.params, SamplingParams) and only.params.n == 1
        self.is_stream = self.is_text and has_one_sample
        """Whether the text of the only sample is printed as it comes."""
        self._num_printed_jobs = 0

    def compute(self, engine: Engine, jobs: list[Job], sampling: str) -> None:
        """Run the jobs that have no result yet, record each result as it comes, and print the summary."""
        with engine:
            if self.results is not None:
                self.results.start([self.records[job.number] for job in self.jobs if job.number in self.records])
            job_of = {str(job.number): job for job in jobs}
            progress = ProgressReport()
            compiled_s, start = engine.stats()["compile_seconds"], time.monotonic()
            first_tokens: list[float] = []
            num_done = num_printed_chars = 0
            try:
                requests = list(self._requests(engine, jobs))
                for output in engine.run_until_done(requests, stream=self.is_stream, on_error="return"):
                    if self.is_stream:
                        text = output.outputs[0].text
                        print(text[num_printed_chars:], end="", flush=True)
                        num_printed_chars = len(text)
                    if not output.finished:
                        continue
                    num_done += 1
                    if output.metrics.first_token_time is not None:
                        first_tokens.append(output.metrics.first_token_time)
                    job = job_of[output.request_id]
                    if output.error is None:
                        self._record(job, output_record(job, output))
                    else:
                        self._fail(job, output.error or "the request failed")
                    if not self.is_stream:
                        progress("requests", num_done, len(requests))
            finally:
                progress.close()
                if self.results is not None:
                    self.results.close()
            elapsed_s = time.monotonic() - start - (engine.stats()["compile_seconds"] - compiled_s)
            started = time.monotonic() - seconds_since_start()
            for line in _summary(engine, sampling, elapsed_s, min(first_tokens, default=started) - started):
                say(line)

    def finish(self) -> None:
        """Put the output file into the order of the jobs, and print what is not yet printed."""
        if self.results is not None:
            self.results.finish([self.records[job.number] for job in self.jobs])
        self._print_ready()

    def _requests(self, engine: Engine, jobs: list[Job]) -> Iterator[Request]:
        """Yield a request for each job; one that the engine can never run gets an error as its result instead."""
        for job in jobs:
            try:
                yield engine.prepare_request(str(job.number), job.prompt, job.params, number=job.number)
            except InvalidRequestError as error:
                self._fail(job, error)

    def _fail(self, job: Job, error: InvalidRequestError | str) -> None:
        """Record an error as the job's result, and say it on stderr."""
        say(f"error: {job.id}: {error}")
        self._record(job, error_record(job.id, error))

    def _record(self, job: Job, record: dict[str, Any]) -> None:
        self.records[job.number] = record
        if self.results is not None:
            self.results.append(record)
        self._print_ready()

    def _print_ready(self) -> None:
        """Print results on stdout in the order of the jobs, up to the first job that has no result yet."""
        while self._num_printed_jobs < len(self.jobs):
            record = self.records.get(self.jobs[self._num_printed_jobs].number)
            if record is None:
                return
            self._num_printed_jobs += 1
            if self.is_json:
                print(dump_line(record), flush=True)
            elif self.is_stream:
                print(end="" if "error" in record else "\n", flush=True)
            elif self.is_text:
                for output in record.get("outputs", ()):
                    # The job's id and the sample's index label the text, each where there are several of it.
                    names = [(record["id"], self.jobs), (output["index"], record["outputs"])]
                    label = ".".join(str(name) for name, group in names if len(group) > 1)
                    print(f"[{label}] {output['text']}", flush=True)


def _jobs(
    args: argparse.Namespace,
    config: EngineConfig,
    handle: ModelHandle,
    prompts: list[str],
    flags: Mapping[str, Any],
    beams: Mapping[str, Any] | None,
    template: str | None,
) -> list[Job | BadLine]:
    """Return a job for each prompt or line of the file, in order; ConfigError for flags that the model cannot take."""
    from ..sampling.logit_rules_spec import LogitRulesSpec
    from ..startup.sizing import requested_max_len, requested_max_seqs

    has_template = template is not None or (handle.tokenizer is not None and handle.tokenizer.has_chat_template)
    if args.chat and not has_template:
        raise ConfigError("--chat: the model has no chat template; give --chat-template F, or leave it out")
    use_chat = has_template if args.chat is None else args.chat
    if template is not None and not use_chat:
        raise ConfigError("--chat-template: has no effect with --no-chat; leave one of them out")
    if args.system is not None and not use_chat:
        raise ConfigError("--system: needs a chat template; give --chat-template F, or put it into the prompt")
    rules_spec = LogitRulesSpec(handle.spec.vocab_size)
    reader = JobReader(
        encoder=handle.prompt_encoder(config, rules_spec, requested_max_len(config, handle.spec), template),
        beams=beams,
        defaults={**handle.sampling_defaults, **flags},
        max_logprobs=config.max_logprobs,
        max_num_seqs=requested_max_seqs(config),
        scheduling_policy=config.scheduling_policy,
        use_chat=use_chat,
        system=args.system,
    )
    if args.prompt_file is not None:
        return reader.file_jobs(Path(args.prompt_file))
    return [reader.job(index, index, prompt, {}) for index, prompt in enumerate(prompts)]


def _start_engine(config: EngineConfig, handle: ModelHandle, jobs: list[Job]) -> Engine:
    """Start an engine whose pages and first executables are those that the jobs need."""
    from ..engine import Engine
    from ..sampling.sampling_params import sample_mode
    from ..startup.sizing import Demand

    demands = [Demand(len(job.prompt.token_ids), job.params.max_tokens, job.params.n) for job in jobs]
    modes = {sample_mode(job.params) for job in jobs}
    with closing(ProgressReport()) as progress:
        return Engine.from_engine_args(config, handle, demands=demands, modes=modes, progress=progress)


def _effective(jobs: list[Job], flags: Mapping[str, Any], handle: ModelHandle) -> str:
    """Return a summary of the sampling parameters in effect, and where each came from, on one line.

    Sources are a flag, a line of the input file, the model's generation_config.json, or the default; parameters left at
    an inconspicuous default are not shown. Of a beam search all values are shown, without sources.
    """
    if isinstance(jobs[0].params, BeamSearchParams):
        return " · ".join(f"{name} {value}" for name, value in vars(jobs[0].params).items())
    shown = []
    for name in FIELDS:
        values = [getattr(job.params, name) for job in jobs]
        source = "flag" if name in flags else "model" if name in handle.sampling_defaults else "default"
        value = values[0]
        if any(other != value for other in values):
            shown.append(f"{name} varies (lines of the file)")
        elif name in SHOWN_PARAMS or source != "default" or value != _DEFAULTS[name]:
            source = source if value == {**_DEFAULTS, **handle.sampling_defaults, **flags}[name] else "line"
            shown.append(f"{name} {value} ({source})")
    return " · ".join(shown)


def _template(path: str) -> str:
    """Read a chat template; raise ConfigError if it is no readable UTF-8 file or no valid Jinja2."""
    import jinja2

    from ..text.template_environment import compile_template

    try:
        text = Path(path).read_text(encoding="utf-8")
        compile_template(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: {path!r} cannot be read ({error}); give a readable UTF-8 file") from error
    except jinja2.TemplateSyntaxError as error:
        fault = f"line {error.lineno}: {error.message}"
        raise ConfigError(f"--chat-template: {path} is no valid Jinja2, {fault}") from error
    return text


def _summary(engine: Engine, sampling: str, elapsed_s: float, first_token_s: float) -> Iterator[str]:
    """Give the lines of the summary: device, memory, sampling, start-up times, throughput and pages."""
    stats, sizes, step = engine.stats(), engine.sizes, engine.step_sizes
    yield ""
    device = f"{engine.device.device_kind} ({engine.device.platform})"
    yield f"device: {device} · {step.dtype}, KV {step.kv_cache_dtype}"
    if engine.mesh.size > 1:
        yield f"mesh: {engine.handle.config.shares(engine.mesh.size)}"
    yield f"attention: {engine.attention}"
    if engine.handle.config.longrope:
        yield f"rotary embedding: {engine.handle.config.longrope}"
    yield f"memory: {engine.memory}"
    yield f"sampling: {sampling}"
    yield (
        f"start: load {engine.load_s:.1f} s · compile {stats['compile_seconds']:.1f} s · "
        f"first token {first_token_s:.1f} s after process start"
    )
    yield (
        f"throughput: {stats['generation_tokens'] / elapsed_s:.1f} output tokens/s, "
        f"{stats['prompt_tokens'] / elapsed_s:.1f} prompt tokens/s over {elapsed_s:.1f} s (compilation excluded)"
    )
    recomputed, swapped = stats["preemptions_recompute"], stats["preemptions_swap"]
    pages = [
        f"peak {stats['peak_blocks_used']} of {stats['blocks']} × {step.block_size} tokens{sizes.arithmetic.in_groups}",
        sizes.num_host_blocks and f"host peak {stats['peak_host_blocks_used']} of {sizes.num_host_blocks - 1}",
        f"preemptions {recomputed + swapped} ({recomputed} by recompute, {swapped} by swap)",
        stats["swap_bytes"] and f"swapped {stats['swap_bytes'] / 1e6:.1f} MB",
        stats["copies"] and f"copies on write {stats['copies']}",
        f"prefix cache hits {stats['prefix_cache_hits'] / max(1, stats['prefix_cache_queries']):.1%}",
        f"padding {stats['padding_share']:.1%}",
        f"recompiles {stats['recompiles']}",
    ]
    yield f"pages: {' · '.join(str(part) for part in pages if part)}"
