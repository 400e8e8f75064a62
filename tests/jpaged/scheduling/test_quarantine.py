"""After repeated failures requests are tried one by one; the one that fails alone is found, and no other one ends."""

import pytest

from jpaged.request import Request, RequestState
from jpaged.scheduling.quarantine import MAX_FAILED_STEPS, FailureVerdict, Quarantine

from ..host_requests import new_request

RETRY, END_ISOLATED, END_ALL = FailureVerdict


@pytest.fixture
def requests() -> list[Request]:
    return [new_request([1], request_id=str(number), number=number) for number in range(MAX_FAILED_STEPS + 1)]


def fail_until_isolated(quarantine: Quarantine, running: list[Request], num_generated: int = 0) -> None:
    for _ in range(MAX_FAILED_STEPS):
        assert quarantine.isolated_request is None
        assert quarantine.note_failure(running, num_generated) is RETRY


def test_failures_with_a_token_between_them_isolate_no_request(requests: list[Request]) -> None:
    quarantine = Quarantine()
    for num_generated in range(5 * MAX_FAILED_STEPS):
        assert quarantine.note_failure(requests, num_generated // (MAX_FAILED_STEPS - 1)) is RETRY
        assert quarantine.isolated_request is None


def test_each_running_request_is_isolated_until_it_has_a_token(requests: list[Request]) -> None:
    quarantine = Quarantine()
    fail_until_isolated(quarantine, requests)
    for num_generated, request in enumerate(requests, 1):
        assert quarantine.isolated_request is request
        assert not quarantine.note_step(num_generated - 1), "a step without a token releases no request"
        assert quarantine.isolated_request is request
        assert quarantine.note_step(num_generated)
    assert quarantine.isolated_request is None
    assert not quarantine.note_step(num_generated + 1)


def test_a_request_that_fails_alone_ends_and_the_next_one_is_isolated(requests: list[Request]) -> None:
    quarantine = Quarantine()
    fail_until_isolated(quarantine, requests)
    assert quarantine.note_step(1)
    assert quarantine.isolated_request is requests[1]
    assert quarantine.note_failure([requests[1]], 1) is END_ISOLATED
    requests[1].state = RequestState.FINISHED_ERROR
    assert quarantine.isolated_request is requests[2]


def test_a_quarantined_request_that_ends_is_not_isolated_any_more(requests: list[Request]) -> None:
    quarantine = Quarantine()
    fail_until_isolated(quarantine, requests[:2])
    for request in requests[:2]:
        request.state = RequestState.FINISHED_ABORTED
    assert quarantine.isolated_request is None


def test_all_requests_end_if_several_fail_alone(requests: list[Request]) -> None:
    quarantine = Quarantine()
    fail_until_isolated(quarantine, requests)
    for request in requests[: MAX_FAILED_STEPS - 1]:
        assert quarantine.isolated_request is request
        assert quarantine.note_failure([request], 0) is END_ISOLATED
        request.state = RequestState.FINISHED_ERROR
    assert quarantine.note_failure([requests[MAX_FAILED_STEPS - 1]], 0) is END_ALL
    fail_until_isolated(quarantine, requests[-1:])  # All is forgotten.


def test_all_requests_end_if_steps_fail_in_which_none_is_running(requests: list[Request]) -> None:
    quarantine = Quarantine()
    assert [quarantine.note_failure([], 0) for _ in range(MAX_FAILED_STEPS)] == [RETRY, RETRY, END_ALL]
