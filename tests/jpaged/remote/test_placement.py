"""Which core a request goes to: its prefix's, unless that has too much to do; equal prompts spread."""

import heapq
import random
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from jpaged.messages import NewRequest
from jpaged.remote.placement import Placement
from jpaged.sampling.sampling_params import BeamSearchParams, SamplingParams

PAGE = 16


def request(tokens: Sequence[int], *, max_tokens: int = 10, **fields: Any) -> NewRequest:
    return NewRequest(
        request_id="",
        number=0,
        prompt_token_ids=array("i", tokens).tobytes(),
        prompt=None,
        params=SamplingParams(max_tokens=max_tokens, n=fields.pop("n", 1)),
        max_tokens=max_tokens,
        stop_ids=frozenset(),
        arrival_time=0.0,
        **fields,
    )


def placement(num_cores: int = 2, *, num_pages: int = 1000) -> Placement:
    return Placement(num_cores, page_size=PAGE, num_pages=num_pages)


def place(found: Placement, *messages: NewRequest) -> tuple[int, Any]:
    """Place requests on the best core; return it, and what ends them."""
    tokens = found.tokens_of(messages)
    core = found.ranked(tokens, range(len(found._cores)))[0]
    return core, found.place(tokens, core)


def prompt(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_tokens)


def test_a_request_goes_where_its_prefix_is_until_more_than_that_saves_waits_there():
    found, first = placement(), prompt(1, 160)
    core, end = place(found, request(first))
    end()
    assert core == 0
    found.place(found.tokens_of([request(prompt(2, 150))]), 0)
    assert found.num_unfinished_tokens(0) == 151
    core, end = place(found, request([*first, 1, 2, 3]))
    assert core == 0, "3 + 151 tokens are less than 163"
    assert found.num_unfinished_tokens(0) == 151 + 3 + 1, "what is cached is not computed"
    end()
    found.place(found.tokens_of([request(prompt(3, 8))]), 0)
    assert place(found, request([*first, 1, 2, 3]))[0] == 0, "3 + 160 tokens are as many as 163"
    assert place(found, request([*first, 1, 2, 3]))[0] == 1, "now there are four more"


def test_equal_prompts_spread_and_equal_requests_go_to_each_core_in_turn():
    for num_cores in (2, 3):
        found = placement(num_cores)
        cores = [place(found, request(prompt(1, 600)))[0] for _ in range(16 * num_cores)]
        assert {cores.count(core) for core in range(num_cores)} == {16}


def test_requests_count_until_they_are_over_and_once():
    found = placement()
    messages = [request(prompt(seed, 100), n=3) for seed in (1, 2)]
    beams = msgspec.structs.replace(messages[0], params=BeamSearchParams(max_tokens=20, beam_width=4))
    _, end = place(found, *messages, beams)
    assert found.num_unfinished_tokens(0) == 3 * 100 + 3 + 3 + 4
    end()
    end()
    assert found.num_unfinished_tokens(0) == 0


def test_another_salt_is_another_prefix():
    found = placement()
    place(found, request(prompt(1, 160), cache_salt="a"))[1]()
    others = [request(prompt(1, 160), cache_salt=salt) for salt in ("a", "b", None)]
    num_cached = [found._cores[0].num_cached(found.tokens_of([one]).prompts[0]) for one in others]
    assert num_cached == [10, 0, 0]


def test_a_core_caches_as_many_pages_as_its_pool_and_forgets_the_ends_of_old_prompts_first():
    found = placement(num_pages=12)
    prompts = [prompt(seed, 5 * PAGE) for seed in range(3)]

    def num_cached() -> list[int]:
        return [found._cores[0].num_cached(found.tokens_of([request(one)]).prompts[0]) for one in prompts]

    for one in prompts[:2]:
        found.place(found.tokens_of([request(one)]), 0)()
    assert num_cached() == [5, 5, 0]
    found.place(found.tokens_of([request(prompts[0])]), 0)()  # Used again: the other one is the oldest now.
    found.place(found.tokens_of([request(prompts[2])]), 0)()
    assert num_cached() == [5, 2, 5]
    found.forget_prefixes()
    assert num_cached() == [0, 0, 0]


def test_without_a_prefix_cache_the_core_with_the_least_to_do_is_taken():
    found = placement(num_pages=0)
    end = place(found, request(prompt(1, 500)))[1]
    assert place(found, request(prompt(1, 500)))[0] == 1
    end()
    assert place(found, request(prompt(2, 5000)))[0] == 0


def test_a_new_core_has_nothing_and_the_end_of_its_predecessors_requests_changes_nothing():
    found = placement()
    core, end = place(found, request(prompt(1, 160)))
    found.forget(core)
    assert found.num_unfinished_tokens(core) == 0
    place(found, request(prompt(2, 50)))
    end()
    assert found.num_unfinished_tokens(core) == 51
    assert found.ranked(found.tokens_of([request(prompt(1, 160))]), [1]) == [1], "only these cores"


class Chats:
    """Conversations whose next turn comes once the last one has its answer, all begun at once."""

    def __init__(self, num_cores: int, seed: int):
        self.random, self.placement = random.Random(seed), placement(num_cores, num_pages=4096)
        self.cached: list[set[bytes]] = [set() for _ in range(num_cores)]
        self.computed = [0] * num_cores
        """Tokens that each core has computed."""
        self.num_hits = self.num_queries = 0

    def run(self, num_chats: int = 50, num_turns: int = 6, answer: int = 32) -> None:
        system = self.random.choices(range(1000), k=64)
        histories = [list(system) for _ in range(num_chats)]
        events: list[tuple[float, int, int, Any]] = [(0.0, chat, 0, None) for chat in range(num_chats)]
        while events:
            now_s, chat, turn, end = heapq.heappop(events)
            if end is not None:
                end()
            if turn == num_turns:
                continue
            histories[chat] += self.random.choices(range(1000), k=150)
            num_new, end = self.take(histories[chat], answer)
            histories[chat] += self.random.choices(range(1000), k=answer)
            took_s = num_new * 0.001 * self.random.uniform(0.5, 1.5) + answer * 0.02 * self.random.uniform(0.3, 1.7)
            heapq.heappush(events, (now_s + took_s, chat, turn + 1, end))

    def take(self, history: list[int], answer: int) -> tuple[int, Any]:
        """Compute a turn on the core that is chosen; return the tokens that it has not cached, and what ends it."""
        message = request(history, max_tokens=answer)
        core, end = place(self.placement, message)
        hashes = self.placement.tokens_of([message]).prompts[0]
        num_hits = next((index for index, one in enumerate(hashes) if one not in self.cached[core]), len(hashes)) * PAGE
        self.cached[core].update(hashes)
        self.num_hits, self.num_queries = self.num_hits + num_hits, self.num_queries + len(history)
        self.computed[core] += len(history) - num_hits + answer
        return len(history) - num_hits, end


@pytest.mark.parametrize("seed", range(3))
def test_conversations_find_their_prefix_again_and_load_all_cores(seed: int):
    alone, both = Chats(1, seed), Chats(2, seed)
    alone.run()
    both.run()
    assert both.num_hits / both.num_queries >= 0.98 * alone.num_hits / alone.num_queries
    assert max(both.computed) <= 1.1 * min(both.computed)
