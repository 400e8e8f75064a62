"""Requests that are read ahead of the engine, and queued in the policy's order."""

import pytest

from jpaged.errors import QueueFullError
from jpaged.scheduling import request_source
from jpaged.scheduling.request_source import RequestSource


class Keyed:
    """What the source reads of a request."""

    def __init__(self, number, key):
        self.number, self.policy_key = number, key


def drain(source, room=100, is_idle=False):
    """Return the numbers of the requests that are queued until `room` of them are."""
    queued = []

    def add(request):
        if len(queued) == room:
            raise QueueFullError("waiting_requests", got=room + 1, allowed=room)
        queued.append(request.number)

    source.queue(add, is_idle=is_idle)
    return queued


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(request_source, "MIN_READ_AHEAD", 4)


def test_no_more_are_read_than_may_wait_and_the_policy_orders_those():
    source = RequestSource((Keyed(number, -number) for number in range(7)), max_num_seqs=1)
    source.read(0)
    assert drain(source) == [3, 2, 1, 0]
    source.read(3)
    assert drain(source) == [4]
    assert not source.is_empty
    source.read(0)
    assert drain(source) == [6, 5]
    assert source.is_empty


def test_equal_keys_keep_the_order_of_reading_and_twice_the_sequences_are_read():
    source = RequestSource((Keyed(number, 0) for number in range(9)), max_num_seqs=4)
    source.read(0)
    assert drain(source) == list(range(8))


def test_none_is_asked_for_again_and_ends_nothing():
    source = RequestSource(iter([Keyed(0, 0), None, None, Keyed(1, 0)]), max_num_seqs=1)
    for wanted in ([0], [], [1]):
        source.read(0)
        assert drain(source) == wanted
    assert source.is_empty


def test_a_full_queue_keeps_the_others_and_raises_where_nothing_runs():
    source = RequestSource((Keyed(number, 0) for number in range(3)), max_num_seqs=1)
    source.read(0)
    assert drain(source, room=2) == [0, 1]
    with pytest.raises(QueueFullError):
        drain(source, room=0, is_idle=True)
    assert drain(source) == [2]
