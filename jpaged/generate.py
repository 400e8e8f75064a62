"""`jpaged generate`: prompts in, text out. Everything that can be wrong is found before weights are loaded.

Exit status: 0 if every request succeeded, 1 for a bad start (one line on stderr, nothing written), 3 if some
requests failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, InvalidRequestError, JpagedError, ModelLoadError, QueueFullError
from .flags import beam_flags, engine_config, parse_generate, sampling_flags
from .jobs import BadLine, Job, JobReader, error_record
from .progress import ProgressReport, say, seconds_since_start
from .results import ResultFile, dump_line, output_record
from .sampling_params import FIELDS, BeamSearchParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from .config import EngineConfig
    from .engine import Engine
    from .opening import OpenedModel
    from .outputs import RequestOutput

EXIT_BAD_START = 1
EXIT_SOME_FAILED = 3
EXIT_INTERRUPTED = 130
SHOWN_PARAMS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
"""Always shown; the others when somebody set them."""
_DEFAULTS = {name: getattr(SamplingParams(max_tokens=None), name) for name in FIELDS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # No character of an answer may end the run.
    try:
        return _run(parse_generate(list(sys.argv[1:] if argv is None else argv)))
    except (JpagedError, ModelLoadError) as error:
        say("error: " + " ".join(str(error).split()))
        return EXIT_BAD_START
    except KeyboardInterrupt:
        say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # Whoever read stdout has gone, as `| head` does.
        sys.stdout = None  # type: ignore[assignment]
        return EXIT_BAD_START
    except OSError as error:  # A full disk, a device that went away.
        say(f"error: {error}; what was finished is in the output file, if there is one: go on with --resume")
        return EXIT_BAD_START


def _run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    flags = sampling_flags(args)
    SamplingParams(**flags)
    beams = beam_flags(args)
    if beams is not None:
        BeamSearchParams(**{"max_tokens": None, **beams})
    prompts = _prompts(args)
    if args.resume and args.output is None:
        raise ConfigError("--resume: needs --output F, the file to go on with")
    for name in ("logprobs", "prompt_logprobs"):
        if name in flags and args.output is None and not args.json:
            raise ConfigError(f"--{name.replace('_', '-')}: has no place in plain text; add --json or --output F")
    prompt_file = None if args.prompt_file is None else Path(args.prompt_file)
    results = None if args.output is None else ResultFile(Path(args.output), prompt_file=prompt_file)
    template = None if args.chat_template is None else _template(args.chat_template)

    from .opening import open_for_engine

    opened = open_for_engine(config)
    jobs = _jobs(args, config, opened, prompts, flags, beams, template)
    records, num_others = results.finished_records(jobs) if results and args.resume else ({}, 0)
    missing = [job for job in jobs if isinstance(job, Job) and job.number not in records]
    if args.resume:
        others = f"; {num_others} of other prompts are dropped" if num_others else ""
        say(f"resume: {len(records)} of {len(jobs)} are there already{others}")
    for job in jobs:
        if isinstance(job, BadLine):
            kind = type(job.error).__name__
            records[job.number] = error_record(job.id, kind, str(job.error), job.error.param)
            say(f"error: {job.id}: {job.error}")
    run = _Run(args, jobs, records, results)
    if missing:
        run.compute(_start_engine(config, opened, missing), missing, _effective(missing, flags, opened))
    run.finish()
    return EXIT_SOME_FAILED if run.num_failed else 0


class _Run:
    """The results of one command, wherever they go: a file, JSON lines, or plain text on stdout."""

    def __init__(
        self,
        args: argparse.Namespace,
        jobs: list[Job | BadLine],
        records: dict[int, dict[str, Any]],
        results: ResultFile | None,
    ):
        self.jobs, self.records, self.results = jobs, records, results
        self.is_json = args.json
        self.is_text = not args.json and results is None
        only = jobs[0] if len(jobs) == 1 else None
        is_one = isinstance(only, Job) and isinstance(only.params, SamplingParams) and only.params.n == 1
        self.is_stream = self.is_text and is_one
        self._next = 0

    @property
    def num_failed(self) -> int:
        return sum("error" in record for record in self.records.values())

    def compute(self, engine: Engine, jobs: list[Job], sampling: str) -> None:
        """Run the jobs that are missing, handing each result on as it comes."""
        with engine:
            if self.results is not None:
                self.results.start([self.records[job.number] for job in self.jobs if job.number in self.records])
            job_of = {str(job.number): job for job in jobs}
            progress = ProgressReport()
            compiled_s, start = engine.stats()["compile_seconds"], time.monotonic()
            first_tokens: list[float] = []
            try:
                for num_done, output in enumerate(self._outputs(engine, jobs), 1):
                    if output.metrics.first_token_time is not None:
                        first_tokens.append(output.metrics.first_token_time)
                    self._take(job_of[output.request_id], output)
                    if not self.is_stream:
                        progress("requests", num_done, len(jobs))
            finally:
                progress.close()
                if self.results is not None:
                    self.results.close()
            elapsed_s = time.monotonic() - start - (engine.stats()["compile_seconds"] - compiled_s)
            started = time.monotonic() - seconds_since_start()
            for line in _summary(engine, sampling, elapsed_s, min(first_tokens, default=started) - started):
                say(line)

    def finish(self) -> None:
        """Write what has to be in order: the file, and lines of errors alone."""
        ordered = [self.records[job.number] for job in self.jobs]
        if self.results is not None:
            self.results.finish(ordered)
        self._show_ready()

    def _take(self, job: Job, output: RequestOutput) -> None:
        if output.error is not None:
            say(f"error: {job.id}: {output.error}")
            self._put(job, error_record(job.id, "EngineError", output.error or "the request failed", None))
        else:
            self._put(job, output_record(job, output))

    def _refuse(self, job: Job, error: InvalidRequestError) -> None:
        say(f"error: {job.id}: {error}")
        self._put(job, error_record(job.id, type(error).__name__, str(error), error.param))

    def _put(self, job: Job, record: dict[str, Any]) -> None:
        self.records[job.number] = record
        if self.results is not None:
            self.results.append(record)
        self._show_ready()

    def _outputs(self, engine: Engine, jobs: list[Job]) -> Iterator[RequestOutput]:
        """Each job's output as it ends. What the queue has no room for yet is held back until it has."""
        held = deque(jobs)
        while held or engine.has_unfinished_requests():
            while held and self._is_settled(engine, held[0]):
                held.popleft()
            yield from self._stream(engine) if self.is_stream else _ended(engine)

    def _is_settled(self, engine: Engine, job: Job) -> bool:
        """Queue a job, or end it if the engine can never take it; False if it must be tried again later."""
        try:
            params = job.params
            if isinstance(params, SamplingParams) and not self.is_stream:
                params = replace(params, output_kind=RequestOutputKind.FINAL_ONLY)  # Nobody sees what comes before.
            engine.enqueue(str(job.number), job.prompt, params, number=job.number)
        except QueueFullError:
            if not engine.has_unfinished_requests():
                raise
            return False
        except InvalidRequestError as error:
            self._refuse(job, error)
        return True

    def _stream(self, engine: Engine) -> Iterator[RequestOutput]:
        """Show the text of the only request as it comes; gives its output when it ends."""
        num_shown = 0
        while engine.has_unfinished_requests():
            for output in _step(engine):
                text = output.outputs[0].text
                print(text[num_shown:], end="", flush=True)
                num_shown = len(text)
                if output.finished:
                    yield output

    def _show_ready(self) -> None:
        """Show results on stdout in input order, as far as they are there."""
        while self._next < len(self.jobs) and (record := self.records.get(self.jobs[self._next].number)):
            self._next += 1
            if self.is_json:
                print(dump_line(record), flush=True)
            elif "error" in record or not self.is_text:
                continue
            elif self.is_stream:
                print(flush=True)
            else:
                for output in record["outputs"]:
                    of_several = [(record["id"], self.jobs), (output["index"], record["outputs"])]
                    label = ".".join(str(name) for name, those in of_several if len(those) > 1)
                    print(f"[{label}] {output['text']}", flush=True)


def _step(engine: Engine) -> list[RequestOutput]:
    """One step's outputs. If steps fail for good, the next one tells of the requests that have ended by it."""
    try:
        return engine.step()
    except Exception:
        if engine.scheduler.has_unfinished:
            raise
        return []  # The engine has logged it.


def _ended(engine: Engine) -> list[RequestOutput]:
    return [output for output in _step(engine) if output.finished]


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = [*args.prompts, *args.prompt]
    if bool(prompts) is (args.prompt_file is not None):
        given = "prompts and --prompt-file" if prompts else "no prompt"
        raise ConfigError(f'prompt: got {given}, allowed: either; try jpaged generate "What is the capital of France?"')
    if prompts.count("-") > 1:
        raise ConfigError("prompt: got - twice, allowed: once, stdin is read to its end")
    if "-" in prompts and sys.stdin is None:
        raise ConfigError("prompt: got -, and stdin is closed; give the prompt as an argument")
    return [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in prompts]


def _jobs(
    args: argparse.Namespace,
    config: EngineConfig,
    opened: OpenedModel,
    prompts: list[str],
    flags: Mapping[str, Any],
    beams: Mapping[str, Any] | None,
    template: str | None,
) -> list[Job | BadLine]:
    from .prompts import PromptEncoder
    from .rule_book import RuleBook
    from .sizing import requested_max_len, requested_max_seqs

    tokenizer = opened.tokenizer
    has_template = tokenizer.has_chat_template or template is not None
    if args.chat and not has_template:
        raise ConfigError("--chat: the model has no chat template; give --chat-template F, or leave it out")
    use_chat = has_template if args.chat is None else args.chat
    if template is not None and not use_chat:
        raise ConfigError("--chat-template: has no effect with --no-chat; leave one of them out")
    if args.system is not None and not use_chat:
        raise ConfigError("--system: needs a chat template; give --chat-template F, or put it into the prompt")
    reader = JobReader(
        encoder=PromptEncoder(
            tokenizer,
            RuleBook(opened.config.vocab_size),
            requested_max_len(config, opened.config),
            chat_template=template,
            max_waiting_tokens=config.limits["waiting_tokens"],
            eos_token_ids=opened.eos_token_ids,
        ),
        beams=beams,
        defaults={**opened.sampling_defaults, **flags},
        max_logprobs=config.max_logprobs,
        max_num_seqs=requested_max_seqs(config),
        scheduling_policy=config.scheduling_policy,
        use_chat=use_chat,
        system=args.system,
    )
    if args.prompt_file is not None:
        return reader.file_jobs(Path(args.prompt_file))
    return [reader.job(index, index, prompt, {}) for index, prompt in enumerate(prompts)]


def _start_engine(config: EngineConfig, opened: OpenedModel, jobs: list[Job]) -> Engine:
    from .engine import Engine
    from .sampling_params import sample_mode
    from .sizing import Demand

    demands = [Demand(len(job.prompt.token_ids), job.params.max_tokens, job.params.n) for job in jobs]
    modes = {sample_mode(job.params) for job in jobs}
    progress = ProgressReport()
    try:
        return Engine.from_engine_args(config, opened, demands=demands, modes=modes, progress=progress)
    finally:
        progress.close()


def _effective(jobs: list[Job], flags: Mapping[str, Any], opened: OpenedModel) -> str:
    """Each sampling parameter as it takes effect, and where it comes from."""
    shown = []
    if isinstance(jobs[0].params, BeamSearchParams):
        return " · ".join(f"{name} {value}" for name, value in vars(jobs[0].params).items())
    for name in FIELDS:
        values = [getattr(job.params, name) for job in jobs]
        source = "flag" if name in flags else "model" if name in opened.sampling_defaults else "default"
        value = values[0]
        if any(other != value for other in values):
            shown.append(f"{name} varies (lines of the file)")
        elif name in SHOWN_PARAMS or source != "default" or value != _DEFAULTS[name]:
            source = source if value == {**_DEFAULTS, **opened.sampling_defaults, **flags}[name] else "line"
            shown.append(f"{name} {value} ({source})")
    return " · ".join(shown)


def _template(path: str) -> str:
    import jinja2

    from .template_environment import compile_template

    try:
        text = Path(path).read_text(encoding="utf-8")
        compile_template(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: {path!r} cannot be read ({error}); give a readable UTF-8 file") from error
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"--chat-template: {path} is no valid Jinja2, line {error.lineno}: {error.message}"
        ) from error
    return text


def _summary(engine: Engine, sampling: str, elapsed_s: float, first_token_s: float) -> Iterator[str]:
    stats, sizes = engine.stats(), engine.sizes
    yield ""
    yield (
        f"device: {engine.device.device_kind} ({engine.device.platform}) · attention: {engine.backend.name} · "
        f"{sizes.dtype}, KV {sizes.kv_cache_dtype}"
    )
    yield f"memory: {sizes.memory}"
    yield f"sampling: {sampling}"
    yield (
        f"start: load {engine.load_seconds:.1f} s · compile {stats['compile_seconds']:.1f} s · "
        f"first token {first_token_s:.1f} s after process start"
    )
    yield (
        f"throughput: {stats['generation_tokens'] / elapsed_s:.1f} output tokens/s, "
        f"{stats['prompt_tokens'] / elapsed_s:.1f} prompt tokens/s over {elapsed_s:.1f} s (compilation excluded)"
    )
    recomputed, swapped = stats["preemptions_recompute"], stats["preemptions_swap"]
    pages = [
        f"peak {stats['peak_blocks_used']} of {stats['blocks']} × {sizes.block_size} tokens",
        f"preemptions {recomputed + swapped} ({recomputed} by recompute, {swapped} by swap)",
        f"prefix cache hits {stats['prefix_cache_hits'] / max(1, stats['prefix_cache_queries']):.1%}",
        f"padding {stats['padding_share']:.1%}",
        f"recompiles {stats['recompiles']}",
    ]
    if stats["copies"]:
        pages.insert(2, f"copies on write {stats['copies']}")
    if stats["swap_bytes"]:
        pages.insert(2, f"swapped {stats['swap_bytes'] / 1e6:.1f} MB")
    if sizes.num_host_blocks:
        pages.insert(1, f"host peak {stats['peak_host_blocks_used']} of {sizes.num_host_blocks - 1}")
    yield f"pages: {' · '.join(pages)}"


if __name__ == "__main__":
    sys.exit(main())
