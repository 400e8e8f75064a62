"""Another engine as a baseline of `jpaged bench`: a command that serves token ids over lines of JSON.

    peer → bench   {"ready": NAME AND VERSION, …}                          once, when its model is loaded
    bench → peer   {"requests": [{"prompt": [ids], "out": n}, …], "max_num_seqs": n}
    peer → bench   {"seconds": s, "tokens": n}                             one answer to each line it reads

The peer decodes each request greedily, exactly `out` tokens, past ends of sequences, and starts each run without a
prefix cache. It measures the seconds from ids to ids. Its logs go to stderr. scripts/peers holds peers for other
engines, and for another checkout of jpaged.
"""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from ...errors import ConfigError
from .workloads import Workload


class PeerBaseline:
    """Another engine in a process of its own, which lives until `close`."""

    def __init__(self, name: str, command: str, max_num_seqs: int):
        """Start `command`, split into words as a shell does it, and wait for the first line: the peer is ready.

        The peer computes at most `max_num_seqs` requests at a time. Raises ConfigError if the command cannot be
        started, ends, or writes anything but a JSON object.
        """
        self.name, self.max_num_seqs = name, max_num_seqs
        try:
            self._process = Popen(shlex.split(command), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--peer: {name} cannot be started: {error}") from error
        self.ready = self._read()  # Waits while the peer loads its model.
        """The peer's first line: its name and version."""

    def run(self, workload: Workload) -> float:
        """Let the peer compute the workload; return the seconds that it measured.

        This writes one line with all requests to the peer and waits, without a time limit, for its answer. Raises
        ConfigError if the peer has ended, answers with no JSON object, or generated another number of tokens than the
        workload wants.
        """
        pairs = zip(workload.prompts, workload.output_lens, strict=True)
        requests = [{"prompt": list(prompt), "out": out} for prompt, out in pairs]
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # The process has ended; reading reports it.
            self._process.stdin.write(json.dumps({"requests": requests, "max_num_seqs": self.max_num_seqs}) + "\n")
            self._process.stdin.flush()
        answer = self._read()
        got, wanted = answer.get("tokens"), workload.num_output_tokens
        if got != wanted:
            raise ConfigError(f"--peer: {self.name} gave {got} tokens for {workload.name}, wanted {wanted}")
        return float(answer["seconds"])

    def close(self) -> None:
        """Kill the peer's process and wait for its end."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        """Wait, without a time limit, for the peer's next line and return its JSON object.

        Raises ConfigError if the peer has ended, with its exit status in the message, or if the line is anything but a
        JSON object, with the beginning of the line.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise ConfigError(f"--peer: {self.name} ended with status {status} and no answer; run its command alone")
        with suppress(ValueError):
            if isinstance(answer := json.loads(line), dict):
                return answer
        got = f"{self.name} wrote {line.strip()[:100]!r}"
        raise ConfigError(f"--peer: {got}, wanted a JSON object; its logs belong to stderr")
