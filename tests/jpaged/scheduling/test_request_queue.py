"""Queues keep the order of a policy, however requests leave them."""

import random

import pytest

from jpaged.errors import InvalidRequestError, QueueFullError
from jpaged.scheduling.request_queue import MIN_STALE, POLICIES, Policy, QueueLimits, RequestQueue, key_shape

from ..host_requests import new_request


def request_of(number, *, priority=0, prompt_len=3):
    request = new_request(range(prompt_len), number=number, priority=priority)
    request.order = (priority, number)
    return request


def test_the_first_request_is_always_that_of_the_lowest_order():
    """Compared with a sorted list; requests that left return too, as preempted ones do."""
    rng = random.Random(3)
    requests = [request_of(number, priority=rng.randrange(4)) for number in range(60)]
    queue, model = RequestQueue(), []
    for _ in range(4000):
        if rng.random() < 0.5 and len(model) < len(requests):
            request = rng.choice([request for request in requests if request not in model])
            queue.push(request)
            model.append(request)
        elif model:
            model.sort(key=lambda request: request.order)
            if rng.random() < 0.5:
                assert queue.pop() is model.pop(0)
            else:
                queue.remove(model.pop(rng.randrange(len(model))))
        model.sort(key=lambda request: request.order)
        assert list(queue) == model
        assert [queue.first()] == model[:1] if model else not queue
        assert (len(queue), queue.num_tokens) == (len(model), 3 * len(model))
        assert len(queue._heap) <= 2 * len(queue) + MIN_STALE + 1


def test_requests_that_leave_behind_a_waiting_one_do_not_fill_the_heap():
    queue, lengths = RequestQueue(), set()
    for number in range(10):
        queue.push(request_of(number))
    for number in range(10, 1000):
        request = request_of(number)
        queue.push(request)
        queue.remove(request)
        lengths.add(len(queue._heap))
    assert lengths == {*range(10, 2 * 10 + MIN_STALE + 1)}, (
        "the heap is rebuilt each time that so many entries are stale"
    )
    assert [queue.pop().number for _ in range(10)] == [*range(10)]
    assert not queue


@pytest.mark.parametrize("keys", [(1, "late"), ((1, 2), (1, "x")), ((1, 2), (1,)), ((), 1.5)], ids=str)
def test_a_key_that_does_not_compare_with_the_first_one_is_refused_each_time(keys):
    policy = Policy(lambda request: keys[request.priority])
    for priority in (0, 0):
        assert policy.key_of(request_of(1, priority=priority)) == keys[0]
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="does not compare") as caught:
            policy.key_of(request_of(2, priority=1))
        assert caught.value.param == "priority"


@pytest.mark.parametrize("key", [lambda request: None, lambda request: 1 / 0], ids=["no order", "an error"])
def test_a_key_function_that_fails_refuses_its_request(key):
    with pytest.raises(InvalidRequestError, match="its key function failed for this request") as caught:
        Policy(key).key_of(request_of(1))
    assert caught.value.param == "priority"


@pytest.mark.parametrize(
    ("limits", "name", "got"),
    [(QueueLimits(waiting_requests=2), "waiting_requests", 3), (QueueLimits(waiting_tokens=8), "waiting_tokens", 9)],
)
def test_limits_count_the_newcomer(limits, name, got):
    queue = RequestQueue(limits)
    for number in range(2):
        queue.check_room(request_of(number))
        queue.push(request_of(number))
    with pytest.raises(QueueFullError, match=f"{name}: got {got} with this request, allowed: {got - 1}") as caught:
        queue.check_room(request_of(2))
    assert caught.value.limit == name
    queue.pop()
    queue.check_room(request_of(2))


def test_the_policy_priority_orders_by_priority_and_fcfs_does_not():
    assert POLICIES["fcfs"](request_of(1, priority=5)) == POLICIES["fcfs"](request_of(2, priority=1))
    assert POLICIES["priority"](request_of(1, priority=5)) > POLICIES["priority"](request_of(2, priority=1))


@pytest.mark.parametrize(
    ("key", "shape"),
    [(3, "number"), (-0.5, "number"), ("a", "text"), ((1, ("b", 2.0)), ("number", ("text", "number")))],
    ids=repr,
)
def test_the_shape_of_a_key_says_what_it_compares_with(key, shape):
    assert key_shape(key) == shape


@pytest.mark.parametrize(
    "key", [None, float("nan"), float("inf"), [1], (1, None), object()], ids=lambda key: type(key).__name__
)
def test_keys_without_a_certain_order_have_no_shape(key):
    with pytest.raises(TypeError, match="got"):
        key_shape(key)
