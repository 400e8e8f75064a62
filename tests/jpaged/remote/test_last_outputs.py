"""Which requests are computed again after the end of a core process, and beside which others."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from jpaged.errors import EngineStoppedError, InvalidRequestError, QueueFullError
from jpaged.messages import NewRequest
from jpaged.outputs import RequestOutput, StepOutputs, error_output
from jpaged.remote import last_outputs
from jpaged.remote.last_outputs import AT_ONCE, ENDED_CORES, MAX_ENDS, LastOutputs
from jpaged.sampling.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=1)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_outputs, "POLL_S", 0.0)


def request(name: str) -> NewRequest:
    return NewRequest(
        request_id=name,
        number=0,
        prompt_token_ids=bytes(4),
        prompt=None,
        params=PARAMS,
        max_tokens=1,
        stop_ids=frozenset(),
        arrival_time=0.0,
    )


class Status:
    is_alive = True


class EndingClient:
    """A client whose core ends, with all requests in flight, once one of `killers` is among them."""

    def __init__(self, killers: set[str] = frozenset(), max_ends: int = 100):  # type: ignore[assignment]
        self.killers, self.num_ends_left = killers, max_ends
        self.in_flight: dict[str, asyncio.Future[StepOutputs]] = {}
        self.groups: list[set[str]] = []
        """What was in flight at each end."""
        self.num_computed: Counter[str] = Counter()
        self.lost_process = ""

    def status(self) -> Status:
        return Status()

    async def submit(self, messages: list[NewRequest], *, takes_deltas: bool) -> Any:
        (name,) = (one.request_id for one in messages)
        self.num_computed[name] += 1
        future = self.in_flight[name] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.001, self.step)
        return Stream(future)

    def step(self) -> None:
        """End the core if a killer is there, else all requests."""
        in_flight, self.in_flight = self.in_flight, {}
        if in_flight.keys() & self.killers:
            self.groups.append(set(in_flight))
            self.num_ends_left -= 1
            if not self.num_ends_left:
                self.lost_process = "gone"
            for future in in_flight.values():
                future.set_exception(EngineStoppedError("the core has ended"))
            return
        for name, future in in_flight.items():
            future.set_result(StepOutputs([], {}, [error_output(name, None, "done")]))


class Stream:
    def __init__(self, future: "asyncio.Future[StepOutputs]"):
        self.future = future

    async def take(self) -> StepOutputs:
        return await self.future

    def close(self) -> None: ...


def computed(client: Any, names: list[str]) -> dict[str, RequestOutput]:
    async def run() -> list[RequestOutput]:
        outputs = LastOutputs(client)
        return await asyncio.gather(*(outputs.of(request(name)) for name in names))

    return {output.request_id: output for output in asyncio.run(run())}


NAMES = [str(number) for number in range(40)]


def test_one_that_ends_cores_gets_an_error_and_no_other_does() -> None:
    client = EndingClient({"7", "23"})
    outputs = computed(client, NAMES)
    failed = {name: output.error for name, output in outputs.items() if output.error != "done"}
    assert failed.keys() == {"7", "23"}
    assert set(failed.values()) == {ENDED_CORES}
    assert client.num_computed["7"] == client.num_computed["23"] == MAX_ENDS


def test_those_that_have_seen_ends_are_computed_by_fewer_and_fewer() -> None:
    client = EndingClient({"7"})
    computed(client, NAMES)
    first, second, third = client.groups
    assert first == set(NAMES)
    assert "7" in second
    assert len(second) <= AT_ONCE[1]
    assert third == {"7"}


def test_one_that_comes_later_waits_for_those_that_have_seen_ends() -> None:
    class Client(EndingClient):
        async def submit(self, messages: list[NewRequest], *, takes_deltas: bool) -> Any:
            stream = await super().submit(messages, takes_deltas=takes_deltas)
            if self.num_computed["7"] == MAX_ENDS and not later:
                later.append(asyncio.create_task(outputs.of(request("later"))))
            return stream

    later: list[asyncio.Task[RequestOutput]] = []
    client = Client({"7"})
    outputs = LastOutputs(client)  # type: ignore[arg-type]

    async def run() -> None:
        assert (await outputs.of(request("7"))).error == ENDED_CORES
        assert (await later[0]).error == "done"

    asyncio.run(run())
    assert client.groups[-1] == {"7"}
    assert client.num_computed["later"] == 1


def test_without_an_end_each_is_computed_once_and_all_at_once() -> None:
    client = EndingClient()
    computed(client, NAMES)
    assert set(client.num_computed.values()) == {1}


def test_the_end_of_the_last_core_is_raised() -> None:
    with pytest.raises(EngineStoppedError, match="the core has ended"):
        computed(EndingClient({"7"}, max_ends=1), NAMES)


def test_a_full_queue_is_waited_for_and_a_refused_request_has_an_error() -> None:
    class Client(EndingClient):
        num_refusals = 3

        async def submit(self, messages: list[NewRequest], *, takes_deltas: bool) -> Any:
            if messages[0].request_id == "bad":
                raise InvalidRequestError("prompt: too long")
            if self.num_refusals:
                self.num_refusals -= 1
                raise QueueFullError("waiting_requests", got=2, allowed=1)
            return await super().submit(messages, takes_deltas=takes_deltas)

    outputs = computed(Client(), ["bad", "good"])
    assert outputs["bad"].error == "prompt: too long"
    assert outputs["good"].error == "done"
