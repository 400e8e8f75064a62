"""`jpaged chat` as a user has it: at a terminal, over a pipe, and with Ctrl-C at any time."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import Any

import pytest

from jpaged import Engine, SamplingParams
from jpaged.commands.dialog.answers import AnswerPart, Message
from jpaged.commands.dialog.conversation import Conversation
from jpaged.commands.dialog.engine_answers import EngineAnswers
from jpaged.commands.dialog.inputs import PipeInput
from jpaged.commands.dialog.repl import COMMANDS, Repl
from jpaged.commands.files.lines import LineSource

from ..tiny_model import CHAT_TEMPLATE, SIZE_FLAGS, SIZES
from .command_line import ROOT, Run

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
# Letters: bytes that form no character would come back as other tokens.
LETTERS: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "allowed_token_ids": [*range(66, 92)]}
GREEDY = SamplingParams(**LETTERS, max_tokens=10)


@pytest.fixture(scope="module")
def engine(tiny: str) -> Iterator[Engine]:
    with Engine(tiny, **SIZES) as engine:
        yield engine


class Interrupting(EngineAnswers):
    """Answers during which Ctrl-C comes, so many parts after their first text."""

    def __init__(self, engine: Engine, params: SamplingParams, *interrupted: str, num_parts: int = 3):
        super().__init__(engine, params)
        self.interrupted, self.num_parts = interrupted, num_parts

    def parts(self, messages: Sequence[Message]) -> Generator[AnswerPart, None, None]:
        num_left = self.num_parts
        for part in super().parts(messages):
            yield part
            num_left -= bool(part.text)
            if num_left == 0 and messages[-1]["content"] in self.interrupted:
                signal.raise_signal(signal.SIGINT)


def converse(answers: EngineAnswers, text: str, system: str | None = None) -> tuple[Run, Conversation]:
    """Talk over a pipe; return the status, both streams, and what is kept of the conversation."""
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    conversation = Conversation(system)
    lines = LineSource(f"/dev/fd/{reader}")
    os.close(reader)
    with closing(lines), redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = Repl(answers, conversation, PipeInput(lines)).run()
    return Run(status, out.getvalue(), err.getvalue()), conversation


def contents(conversation: Conversation) -> list[str]:
    return [turn["content"] for turn in conversation.turns]


def test_a_later_turn_computes_none_of_the_earlier_ones_again(engine: Engine) -> None:
    answers = EngineAnswers(engine, GREEDY)
    before = engine.stats()
    run, conversation = converse(answers, "first\nsecond\n", "Be brief")
    after = engine.stats()
    assert run.returncode == 0, run.stderr
    encoder, answer = engine.builder.encoder, contents(conversation)[1]
    said = encoder.encode({"messages": conversation.messages_with("")[:3]}).text.partition(answer)[0] + answer
    num_computed = len(encoder.tokenizer.encode(said, add_special_tokens=False)) - 1  # All but the last token.
    page = SIZES["block_size"]
    assert after["prefix_cache_hits"] - before["prefix_cache_hits"] == num_computed // page * page > 40
    assert run.stdout == "".join(f"{text}\n" for text in contents(conversation)[1::2])


def test_lines_of_a_pipe_are_turns_and_commands_and_text_with_a_slash(engine: Engine) -> None:
    text = "one\n/system Be kind\n/system\n\n//two\n/nonsense x\n/reset now\nthree \\\nfour\n/exit\nfive\n"
    run, conversation = converse(EngineAnswers(engine, GREEDY), text)
    assert run.returncode == 3
    assert contents(conversation)[::2] == ["one", "/two", "three \nfour"]
    assert conversation.system == "Be kind"
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert [line.split(":")[1].strip(" '") for line in errors] == ["/nonsense", "/reset"]
    assert all(name in errors[0] for name in COMMANDS)
    assert "five" not in str(conversation)


def test_a_full_conversation_says_how_to_go_on_and_loses_nothing(engine: Engine) -> None:
    """The context of this model is 128 tokens."""
    run, conversation = converse(EngineAnswers(engine, GREEDY), f"{'a' * 40}\n{'b' * 60}\n/reset\n/retry\nc\n")
    assert run.returncode == 3
    (error,) = [line for line in run.stderr.splitlines() if line.startswith("error")]
    assert "/reset" in error
    assert "128 tokens" in error
    assert contents(conversation)[::2] == ["b" * 60, "c"]


def test_ctrl_c_ends_an_answer_and_what_came_of_it_is_kept(engine: Engine) -> None:
    long = SamplingParams(**LETTERS, max_tokens=50)
    run, conversation = converse(Interrupting(engine, long, "stop"), "stop\nmore\n")
    assert run.returncode == 0, run.stderr
    stopped, whole = contents(conversation)[1::2]
    assert 0 < len(stopped) < len(whole)
    assert run.stdout == f"{stopped}\n{whole}\n"
    assert not engine.has_unfinished_requests()


def test_two_interrupts_in_a_row_end_a_pipe(engine: Engine) -> None:
    run, conversation = converse(Interrupting(engine, GREEDY, "a", "b"), "a\nb\nc\n")
    assert run.returncode == 130
    assert contents(conversation)[::2] == ["a", "b"]


CONTROLLED = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""Makes the terminal one whose Ctrl-C is an interrupt of the process."""


def test_one_interrupt_while_a_pipe_is_silent_is_no_end(engine: Engine) -> None:
    reader, writer = os.pipe()

    def interrupt_and_write() -> None:
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.1)
        os.write(writer, b"hello\n")
        os.close(writer)

    lines, conversation = LineSource(f"/dev/fd/{reader}"), Conversation()
    os.close(reader)
    thread = threading.Thread(target=interrupt_and_write)
    with closing(lines), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as err:
        thread.start()
        status = Repl(EngineAnswers(engine, GREEDY), conversation, PipeInput(lines)).run()
        thread.join()
    assert (status, contents(conversation)[0]) == (0, "hello")
    assert "Ctrl-C again ends" in err.getvalue()


def test_thoughts_go_to_stderr_and_are_kept_apart(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    template = f"{CHAT_TEMPLATE}{{# ends with </think> #}}<think>"
    monkeypatch.setattr(engine.builder, "encoder", replace(engine.builder.encoder, chat_template=template))
    thinking = SamplingParams(temperature=0, ignore_eos=True, max_tokens=24, thinking_token_budget=4)
    run, conversation = converse(EngineAnswers(engine, thinking), "hello\n")
    _, said = conversation.turns
    assert said["reasoning_content"]
    assert run.stderr.startswith(said["reasoning_content"] + "\n")
    assert "think" not in run.stdout + run.stderr
    assert run.stdout == said["content"] + "\n"


class Terminal:
    """A process at a terminal of its own."""

    def __init__(self, *args: Any):
        self.master, slave = pty.openpty()
        command = [sys.executable, "-c", CONTROLLED, "-m", "jpaged", "chat", *map(str, args)]
        env = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        os.close(slave)
        self.text = ""

    def interrupt(self) -> None:
        """Press Ctrl-C once readline waits for a key; before that it would not look for a signal."""
        time.sleep(0.2)
        self.type("\x03")

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """Wait until the terminal shows a text; return what came before it, and forget both."""
        end = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < end, self.text
            if select.select([self.master], [], [], 0.1)[0]:
                self.text += os.read(self.master, 65536).decode(errors="replace")
        before, _, self.text = self.text.partition(text)
        return before


def test_a_terminal_has_prompts_pastes_and_ctrl_c(tiny: str, engine: Engine) -> None:
    """The model's only token here is an escape, which must not command the terminal."""
    (escape,) = engine.tokenizer.encode("\x1b", add_special_tokens=False)
    chat = Terminal(tiny, *SIZE_FLAGS, "--allowed-token-ids", escape, "--ignore-eos")
    try:
        chat.wait_for("> ")
        chat.type("/system Two\\\nlines\n/system\n")
        chat.wait_for("Two\r\nlines\r\n")
        chat.type("pasted\nlines\n")
        assert chat.wait_for("the answer was cut").endswith("\\x1b\\x1b\r\n")
        chat.wait_for("> ")
        chat.type("dropped")
        chat.wait_for("dropped")
        chat.interrupt()
        assert chat.wait_for("> ") == "\r\n"
        chat.interrupt()
        chat.wait_for("Ctrl-C again")
        chat.wait_for("> ")
        chat.interrupt()
        assert chat.process.wait(20) == 130
    finally:
        chat.process.kill()
        chat.process.wait()
        os.close(chat.master)
