"""Runs a list of prompts to their end: what `Engine.generate` and the calls of a trainer have in common."""

from __future__ import annotations

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
        loop, builder = self.loop, self.builder
        loop.check_ready(call)
        loop.forget_last_fault()  # Each call logs its first failure with a traceback.
        if on_error not in ("raise", "return"):
            raise refusal("on_error", shown(on_error), "raise, return", error=ConfigError)
        if loop.requests:
            got = f"an engine with {len(loop.requests)} unfinished requests of add_request"
            raise refusal(call, got, "none", "step() them to their end or abort them first", error=ConfigError)
        each_priority = one_for_each(priority, len(prompts), "priority", Integral | None, "an integer")
        outputs: dict[str, Any] = {}
        checked: list[NewRequest] = []
        has_entries = form is ResultForm.ENTRIES
        num_before = builder.num_requests
        for index, (prompt, params, own_priority) in enumerate(zip(prompts, each_params, each_priority, strict=True)):
            request_id = f"{call}-{num_before + index}"
            outputs[request_id] = None  # So that outputs keep the order of the prompts.
            own_number = builder.num_requests if number is None else number
            try:
                new = builder.build(request_id, prompt, params, number=own_number, priority=own_priority, form=form)
                checked.append(msgspec.structs.replace(new, policy_key=loop.make(new).policy_key))
                builder.num_requests += number is None
            except InvalidRequestError as error:
                if on_error == "raise" or not has_entries:
                    builder.num_requests = num_before  # Later requests draw as if this call had never been.
                    raise InvalidRequestError(f"prompt {index}: {error}", param=error.param) from error
                builder.num_requests += 1  # The others draw as they would beside a good one.
                outputs[request_id] = error_output(request_id, prompt, str(error))
        kept: dict[str, Request] = {}
        with progress_bar(len(checked), is_shown=use_tqdm) as bar:
            in_order = sorted(checked, key=lambda new: new.policy_key)
            for request, output in loop.run_requests(map(loop.make, in_order), on_error=on_error):
                if request.failure is not None and on_error == "raise":
                    request.failure.add_note(f"{request.request_id}: {output.error}")
                    raise request.failure
                loop.log_failure(request)
                if not has_entries:
                    kept[request.request_id] = request
                outputs[request.request_id] = output
                bar.update()
        return outputs, [kept[request_id] for request_id in outputs if request_id in kept]
