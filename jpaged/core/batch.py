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
        """Compute one request for each prompt; return their outputs by id in the order of the prompts.

        The second value holds the requests in the order of the prompts, and is empty if `form` is ENTRIES, whose
        results are the outputs. `call` is what errors name, `form` that of `RequestBuilder.build`. `number` is that of
        all requests, which are then not counted. The rest is as in `Engine.generate`.
        """
        if on_error not in ("raise", "return"):
            raise refusal("on_error", shown(on_error), "raise, return", error=ConfigError)
        each_priority = one_for_each(priority, len(prompts), "priority", Integral | None, "an integer")
        ids = [f"{call}-{self.builder.num_requests + index}" for index in range(len(prompts))]
        outputs: dict[str, Any] = dict.fromkeys(ids)  # In the order of the prompts.
        requests: dict[str, Request] = {}
        options: dict[str, Any] = {"raises": on_error == "raise" or form is not ResultForm.ENTRIES, "form": form}
        with self.loop.alone(call), progress_bar(len(prompts), is_shown=use_tqdm) as bar:
            self.loop.forget_last_fault()  # Each call logs its first failure with a traceback.
            arguments = zip(ids, prompts, each_params, each_priority, strict=True)
            checked, refused = self._check(arguments, number=number, **options)
            outputs |= refused
            bar.update(len(refused))
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
        """Check (id, prompt, parameters, priority) of each request; return the requests, and outputs of the bad ones.

        If a bad one `raises`, its InvalidRequestError names its index, and no request of the call has been counted.
        """
        builder, num_before = self.builder, self.builder.num_requests
        checked: list[NewRequest] = []
        refused: dict[str, RequestOutput] = {}
        for index, (request_id, prompt, params, priority) in enumerate(arguments):
            own_number = builder.num_requests if number is None else number
            try:
                new = builder.build(request_id, prompt, params, number=own_number, priority=priority, form=form)
                checked.append(msgspec.structs.replace(new, policy_key=self.loop.make(new).policy_key))
            except InvalidRequestError as error:
                if raises:
                    builder.num_requests = num_before  # Later requests draw as if this call had never been.
                    raise InvalidRequestError(f"prompt {index}: {error}", param=error.param) from error
                refused[request_id] = error_output(request_id, prompt, str(error))
            builder.num_requests += number is None  # After a bad one, others draw as they would beside a good one.
        return checked, refused
