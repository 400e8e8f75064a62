"""Messages between two ends of a line: all of them, in order, from any thread, and none that is too long."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jpaged.remote import message_socket
from jpaged.remote.message_socket import MessageSocket, MessageTooLongError


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MessageSocket, MessageSocket]]:
    monkeypatch.setattr(message_socket, "MAX_QUEUED", 4)
    front = MessageSocket(f"ipc://{tmp_path}/s", is_front=True)
    core = MessageSocket(f"ipc://{tmp_path}/s", is_front=False)
    yield front, core
    front.close()
    core.close()


def received(end: MessageSocket, count: int) -> list[bytes]:
    """Return so many messages, waiting only where `receive` has none."""
    found: list[bytes] = []
    end_s = time.monotonic() + 20
    while len(found) < count:
        if (message := end.receive()) is not None:
            found.append(message)
        else:
            assert time.monotonic() < end_s
            end.wait(20)  # The test would end by its deadline if it were not woken.
    return found


def test_messages_for_which_there_is_no_room_wait_and_arrive_in_order(ends: tuple[MessageSocket, MessageSocket]):
    front, core = ends
    sent = [b"%d " % number * 20_000 for number in range(100)]
    for message in sent:
        core.send(message)
    assert core.is_full
    taking: list[bytes] = []
    thread = threading.Thread(target=lambda: taking.extend(received(front, len(sent))))
    thread.start()
    while core.is_full:  # As the core's socket thread does.
        core.receive()
        core.wait(0.01)
    thread.join()
    assert taking == sent


def test_threads_send_while_another_one_receives(ends: tuple[MessageSocket, MessageSocket]):
    """Each message is answered; a call of `send` may be what takes notice of a message that has come."""
    front, core = ends
    count = 300

    def answer() -> None:
        for _ in range(count):
            core.send(received(core, 1)[0])

    def send(name: bytes) -> None:
        for number in range(count // 3):
            front.send(name + b"%d" % number)

    threads = [
        threading.Thread(target=answer),
        *(threading.Thread(target=send, args=(one,)) for one in (b"a", b"b", b"c")),
    ]
    for thread in threads:
        thread.start()
    found = received(front, count)
    for thread in threads:
        thread.join()
    for name in (b"a", b"b", b"c"):
        assert [one for one in found if one.startswith(name)] == [name + b"%d" % number for number in range(count // 3)]


def test_a_message_that_is_too_long_is_not_sent(
    ends: tuple[MessageSocket, MessageSocket], monkeypatch: pytest.MonkeyPatch
):
    front, core = ends
    monkeypatch.setattr(message_socket, "MAX_MESSAGE_BYTES", 10)
    with pytest.raises(MessageTooLongError, match="a message of 11 bytes"):
        core.send(b"x" * 11)
    core.send(b"x" * 10)
    assert received(front, 1) == [b"x" * 10]


def test_a_closed_end_sends_and_receives_nothing(ends: tuple[MessageSocket, MessageSocket]):
    front, _ = ends
    front.close()
    front.send(b"a")
    front.wake()
    front.clear_wake()
    assert front.receive() is None
    front.close()
