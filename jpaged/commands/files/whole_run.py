"""A run over a file, from its first job to the summary on stderr."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...errors import EngineStoppedError
from ..progress import say, seconds_since_start
from ..summary import SamplingSummary, summary
from .lines import LineSource
from .run import JobT, Run

if TYPE_CHECKING:
    from .run import MessageEngine


def compute_and_summarize(
    run: Run[JobT],
    engine: MessageEngine,
    head: deque[JobT],
    jobs: Iterator[JobT | None],
    lines: LineSource | None,
    sampling: SamplingSummary,
) -> None:
    """Run the jobs of `head` and then of `jobs`, and print the summary on stderr.

    `lines` is the input file, None for prompts of the command line. `head` is empty afterwards. The summary's time to
    the first token counts from the start of the process; it is 0 if no token came. Raises OSError if the output cannot
    be written (a full disk), and EngineStoppedError if nothing computes the requests any more; with an output file the
    message says how to resume.
    """
    try:
        run.start()
        if lines is not None:
            # While requests run, a pipe without a line must not hold up their steps; otherwise wait for its next line.
            lines.wait_for(lambda: 0.0 if run.is_busy else None)
        times = run.compute(engine, head, jobs, sampling)
    except BrokenPipeError:  # An OSError too, but of stdout, which has nothing to resume.
        raise
    except (OSError, EngineStoppedError) as error:
        if run.results is None:
            raise
        text = f"{error}; {run.results.path} keeps every finished request: go on with --resume"
        raise type(error)(text) from error
    started_time = time.monotonic() - seconds_since_start()
    first_token_s = (times.first_token_time or started_time) - started_time
    for line in summary(engine.summary(), sampling, times.elapsed_s, first_token_s):
        say(line)
