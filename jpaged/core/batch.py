"""Runs a list of prompts to their end: what `Engine.generate` and the calls of a trainer have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, count
from numbers import Integral
from typing import Any

import msgspec

from ..checks import refusal, shown
from ..errors import ConfigError, InvalidRequestError
from ..intake.offline import one_for_each
from ..intake.request_builder import RequestBuilder
from ..messages import NewRequest, ResultForm
from ..outputs import RequestOutput, error_output
from ..request import Request
from ..sampling.token_numbers import TokenNumbers
from .engine_loop import EngineLoop
from .inbox import Inbox


class BatchRunner:
    """Checks all prompts of a call, computes one request for each, and returns their results in order."""

    def __init__(self, loop: EngineLoop, builder: RequestBuilder):
        """`builder` is that of the engine whose loop this is."""
        self.loop, self.builder = loop, builder
        self._uncounted_ids = count()

    def run(
        self,
        call: str,
        prompts: list[Any],
        each_params: list[Any],
        *,
        use_tqdm: bool = False,
        priority: Any = None,
        on_error: str = "raise",
        form: ResultForm = ResultForm.ENTRIES,
        number: int | None = None,
    ) -> tuple[dict[str, RequestOutput], list[Request]]:
        """Compute one request for each prompt; return the outputs by request id, and the finished requests.

        Both are in the order of the prompts. The list of requests is empty for the form ENTRIES, whose results are the
        outputs alone. With another form it holds the requests that were computed. `call` names the calling method in
        errors and request ids, and `each_params` has one value per prompt. `priority` is one integer, a list with one
        per prompt, or None. Requests of other callers go on meanwhile. `use_tqdm` shows a progress bar.

        `number` is part of the seed of requests without one: None counts the requests of the engine, and an integer
        is used for all of them, which are then not counted.

        With `on_error="raise"` the exception that ended a request is raised, and with "return" it is logged. A bad
        prompt raises InvalidRequestError before anything is computed; with "return" and the form ENTRIES it gets an
        output with an error instead.
        """
        if on_error not in ("raise", "return"):
            raise refusal("on_error", shown(on_error), "raise, return", error=ConfigError)
        each_priority = one_for_each(priority, len(prompts), "priority", Integral | None, "an integer")
        raises = on_error == "raise" or form is not ResultForm.ENTRIES  # Only ENTRIES has outputs that hold an error.
        from ..intake.progress_bar import progress_bar  # Commands, which start engines for this, need none.

        with progress_bar(len(prompts), is_shown=use_tqdm) as bar:
            self.loop.call(call, partial(self.loop.check_ready, call))
            built = self._build(zip(prompts, each_params, each_priority, strict=True), form=form)
            named = self.name(call, built, number=number, raises=raises)
            # Filled as requests end; the keys keep the prompts' order.
            outputs: dict[str, Any] = dict.fromkeys(named)
            requests: dict[str, Request] = {}
            for prompt, (request_id, new) in zip(prompts, named.items(), strict=True):
                if isinstance(new, InvalidRequestError):
                    outputs[request_id] = error_output(request_id, prompt, str(new))
                    bar.update()
            for request, output in self.compute(named.values(), on_error=on_error):
                if form is not ResultForm.ENTRIES:
                    requests[request.request_id] = request
                outputs[request.request_id] = output
                bar.update()
        return outputs, [requests[request_id] for request_id in named if request_id in requests]

    def compute(
        self,
        messages: Iterable[NewRequest | InvalidRequestError],
        *,
        on_error: str,
        numbers_of: Callable[[str], Sequence[TokenNumbers]] | None = None,
    ) -> Iterator[tuple[Request, RequestOutput]]:
        """Compute the requests of `name`, errors left out, and yield each with its last output as it ends.

        `numbers_of` gives, for the id of a request, the arrays that the numbers of each sample's tokens go to; without
        it samples get arrays of their own. With `on_error="raise"` the exception that ended a
        request is raised, and with "return" it is logged.
        """
        self.loop.forget_last_fault()  # Each call logs its first failure with a traceback.
        # `run_requests` reads only a limited number of requests ahead, so it is given all in the policy's order.
        in_order = sorted((new for new in messages if isinstance(new, NewRequest)), key=lambda new: new.policy_key)
        made = (self._made(new, numbers_of) for new in in_order)
        for request, output in self.loop.run_requests(made, inbox=Inbox(), on_error=on_error):
            if request.failure is not None and on_error == "raise":
                request.failure.add_note(f"{request.request_id}: {output.error}")
                raise request.failure
            self.loop.log_failure(request)
            yield request, output

    def _made(self, new: NewRequest, numbers_of: Callable[[str], Sequence[TokenNumbers]] | None) -> Request:
        """Return the request of a message, with the arrays that `numbers_of` gives its samples."""
        request = self.loop.make(new)
        if numbers_of is not None:
            self.loop.core.results.start_with(request, numbers_of(new.request_id))
        return request

    def _build(
        self, arguments: Iterable[tuple[Any, Any, Any]], *, form: ResultForm
    ) -> list[NewRequest | InvalidRequestError]:
        """Return the message of each request, or the error that refuses it, of tuples (prompt, parameters, priority).

        The messages have neither ids nor numbers yet; `name` gives them these. Other threads may step meanwhile.
        """
        built: list[NewRequest | InvalidRequestError] = []
        for prompt, params, priority in arguments:
            try:
                built.append(self.builder.build("", prompt, params, number=0, priority=priority, form=form))
            except InvalidRequestError as error:
                built.append(error)
        return built

    def unused_id(self, request_id: str) -> str:
        """Return this id, with a number behind it if an unfinished request has it: callers choose ids too."""
        used = self.loop.requests
        return next(one for one in chain([request_id], (f"{request_id}-{i}" for i in count(2))) if one not in used)

    def name(
        self,
        call: str,
        built: Sequence[NewRequest | InvalidRequestError],
        *,
        number: int | None,
        raises: bool = True,
    ) -> dict[str, NewRequest | InvalidRequestError]:
        """Return messages by new ids, in their order; each has its number and its policy's key.

        With a `number` of None, each request gets the count of requests before it, and the count grows, also by
        invalid ones: the seeds of others do not depend on whether this one is valid. An integer is the number of all of
        them. A request that could never fit becomes an error too. If `raises` is true, the first error is raised with
        the index of its prompt, and the count is as before. `call` is the calling method, for ids and errors. Raise
        ConfigError if the engine sleeps.
        """
        return self.loop.call(call, partial(self._name, call, built, number=number, raises=raises))

    def _name(
        self, call: str, built: Sequence[NewRequest | InvalidRequestError], *, number: int | None, raises: bool
    ) -> dict[str, NewRequest | InvalidRequestError]:
        """Return what `name` does. Runs between steps, where no other thread counts."""
        self.loop.check_ready(call)
        named: dict[str, NewRequest | InvalidRequestError] = {}
        for index, new in enumerate(built):
            own_number = self.builder.num_requests + index if number is None else number
            suffix = own_number if number is None else next(self._uncounted_ids)
            request_id = self.unused_id(f"{call}-{suffix}")
            try:
                if isinstance(new, InvalidRequestError):
                    raise new
                new = msgspec.structs.replace(new, request_id=request_id, number=own_number)
                named[request_id] = self.loop.checked(new)
            except InvalidRequestError as error:
                if raises:
                    raise error.within(f"prompt {index}") from error
                named[request_id] = error
        self.builder.num_requests += len(built) if number is None else 0
        return named
