"""Runs a list of prompts to their end: what `Engine.generate` and the calls of a trainer have in common."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

import msgspec

from ..checks import refusal, shown
from ..errors import ConfigError, InvalidRequestError
from ..intake.offline import one_for_each, progress_bar
from ..intake.request_builder import RequestBuilder
from ..messages import NewRequest, ResultForm
from ..outputs import RequestOutput, error_output
from ..request import Request
from .engine_loop import EngineLoop


class BatchRunner:
    """Checks all prompts of a call, computes one request for each, and returns their results in order."""

    def __init__(self, loop: EngineLoop, builder: RequestBuilder):
        """`builder` is that of the engine whose loop this is."""
        self.loop, self.builder = loop, builder

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
        per prompt, or None. During the call no other thread may queue or step requests. `use_tqdm` shows a progress bar
        on a terminal.

        `number` is part of the seed of requests without one: None counts the requests of the engine, and an integer
        is used for all of them, which are then not counted.

        With `on_error="raise"` the exception that ended a request is raised, and with "return" it is logged. A bad
        prompt raises InvalidRequestError before anything is computed; with "return" and the form ENTRIES it gets an
        output with an error instead.
        """
        if on_error not in ("raise", "return"):
            raise refusal("on_error", shown(on_error), "raise, return", error=ConfigError)
        each_priority = one_for_each(priority, len(prompts), "priority", Integral | None, "an integer")
        ids = [f"{call}-{self.builder.num_requests + index}" for index in range(len(prompts))]
        outputs: dict[str, Any] = dict.fromkeys(ids)  # Filled as requests end; the keys keep the prompts' order.
        requests: dict[str, Request] = {}
        raises = on_error == "raise" or form is not ResultForm.ENTRIES  # Only ENTRIES has outputs that hold an error.
        with self.loop.alone(call), progress_bar(len(prompts), is_shown=use_tqdm) as bar:
            self.loop.forget_last_fault()  # Each call logs its first failure with a traceback.
            arguments = zip(ids, prompts, each_params, each_priority, strict=True)
            checked, refused = self._check(arguments, number=number, raises=raises, form=form)
            outputs |= refused
            bar.update(len(refused))
            # `run_requests` reads only a limited number of requests ahead, so it is given all in the policy's order.
            in_order = sorted(checked, key=lambda new: new.policy_key)
            for request, output in self.loop.run_requests(map(self.loop.make, in_order), on_error=on_error):
                if request.failure is not None and on_error == "raise":
                    request.failure.add_note(f"{request.request_id}: {output.error}")
                    raise request.failure
                self.loop.log_failure(request)
                if form is not ResultForm.ENTRIES:
                    requests[request.request_id] = request
                outputs[request.request_id] = output
                bar.update()
        return outputs, [requests[request_id] for request_id in ids if request_id in requests]

    def _check(
        self, arguments: Iterable[tuple[str, Any, Any, Any]], *, number: int | None, raises: bool, form: ResultForm
    ) -> tuple[list[NewRequest], dict[str, RequestOutput]]:
        """Check all requests of a call, given as tuples (id, prompt, parameters, priority).

        Return the messages of the valid requests, and an output with an error message for each invalid one, by its id.
        If `raises` is true, the first invalid request raises InvalidRequestError with its index instead, and the count
        of requests is as before this call. With an integer `number`, all requests get it. With None, each gets the
        count of requests before it, and the count grows, also by invalid ones. `form` is the form of the results. Each
        message has the key that the scheduling policy gives the request.
        """
        builder, num_before = self.builder, self.builder.num_requests
        checked: list[NewRequest] = []
        refused: dict[str, RequestOutput] = {}
        for index, (request_id, prompt, params, priority) in enumerate(arguments):
            request_number = builder.num_requests if number is None else number
            try:
                new = builder.build(request_id, prompt, params, number=request_number, priority=priority, form=form)
                # `make` checks that the request fits, and asks the scheduling policy for its key.
                checked.append(msgspec.structs.replace(new, policy_key=self.loop.make(new).policy_key))
            except InvalidRequestError as error:
                if raises:
                    builder.num_requests = num_before  # The seeds of later requests do not depend on a refused call.
                    raise InvalidRequestError(f"prompt {index}: {error}", param=error.param) from error
                refused[request_id] = error_output(request_id, prompt, str(error))
            builder.num_requests += number is None  # The seeds of others do not depend on whether this one is valid.
        return checked, refused
