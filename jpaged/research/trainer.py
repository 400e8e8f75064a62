"""What a trainer in the same process does with an engine: gives it weights, scores with it, and lets it sleep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import Array, Float, Int

from ..checks import boolean, check, integer, or_none, refusal
from ..core.batch import BatchRunner
from ..core.step_thread import StepThread
from ..errors import ConfigError
from ..intake.offline import as_prompts, one_for_each
from ..messages import Params, ResultForm
from ..sampling.sampling_params import SamplingParams
from ..step.jax_settings import engine_settings
from ..text.prompts import check_priority
from .arrays import LogprobComparison, compare, for_arrays
from .rollouts import Rollouts
from .scores import Scorer

if TYPE_CHECKING:
    from flax import nnx

    from ..models.weights.live_weights import LiveWeights


class Trainer:
    """The calls of `Engine` beside a trainer, over the engine's loop; see there for what they promise."""

    def __init__(self, batch: BatchRunner, live: Callable[[], LiveWeights]):
        """`batch` is that of the engine; `live` returns what says what a trainer's arrays become."""
        self.batch, self.live, self.loop = batch, live, batch.loop
        self.runner, self.versions, self.sleeping = self.loop.runner, self.loop.versions, self.loop.sleep
        self.thread, self.scorer = StepThread(self.loop), Scorer(batch)

    @property
    def params(self) -> nnx.State:
        """Return the engine's weights in its own layout; raise ConfigError while they are away."""
        if not self.runner.store.leaves:
            raise refusal("params", "an engine that sleeps, without weights", "one that has them", error=ConfigError)
        return self.runner.weights.built.state

    def submit(
        self,
        prompts: Any,
        sampling_params: Params | Sequence[Params] | None,
        *,
        max_in_flight: int | None,
        in_order: bool,
        priority: int | None,
    ) -> Rollouts:
        """Return an iterator over the samples of prompts, which a thread computes; see `Engine.submit`."""
        builder, loop = self.batch.builder, self.batch.loop
        loop.check_outside("submit")
        params: Any = builder.default_params() if sampling_params is None else sampling_params
        check("max_in_flight", max_in_flight, or_none(integer(1)))
        check("in_order", in_order, boolean)
        if priority is not None:
            check_priority(priority, builder.config.scheduling_policy)
        pairs: Iterator[tuple[Any, SamplingParams]]
        if isinstance(prompts, Iterator) or isinstance(params, Params):
            shared = for_arrays(params)
            builder.check(shared)  # Here, and not as the error of each prompt.
            prompts = prompts if isinstance(prompts, Iterator) else iter(as_prompts(prompts))
            pairs, num_samples = ((prompt, shared) for prompt in prompts), shared.n
        else:
            prompts = as_prompts(prompts)
            each = list(
                map(for_arrays, one_for_each(params, len(prompts), "sampling_params", Params, "SamplingParams"))
            )
            pairs = iter(list(zip(prompts, each, strict=True)))
            num_samples = max((one.n for one in each), default=1)
        if max_in_flight is None:
            max_in_flight = max(1, 2 * builder.sizes.max_num_seqs // num_samples)
        options: dict[str, Any] = {"max_in_flight": max_in_flight, "in_order": in_order, "priority": priority}
        return Rollouts(self.batch, self.thread, pairs, **options)

    def compare_logprobs(
        self,
        trainer_fn: Callable[[Int[Array, "B N"]], Float[Array, "B N1"]],
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> LogprobComparison:
        """Draw a continuation of each prompt and compare the logprobs of its tokens with a trainer's.

        `trainer_fn` takes int32 ids [B, N] and returns logprobs [B, N − 1]; see `Engine.compare_logprobs`. None as
        `sampling_params` are the model's recommended ones.
        """
        prompts = as_prompts(prompts)
        params = self.batch.builder.default_params() if sampling_params is None else sampling_params
        each = one_for_each(params, len(prompts), "sampling_params", Params, "SamplingParams")
        each = [for_arrays(one) for one in each]
        _, requests = self.batch.run("compare_logprobs", prompts, each, form=ResultForm.ARRAYS)
        return compare(requests, trainer_fn)

    def update_params(self, params: Mapping[str, Any], *, version: int | None, in_flight: str, copy: bool) -> None:
        """Replace all weights by the arrays of the tree `params`. Runs between steps.

        Names and options are checked first, so that a refused call changes nothing. Then unfinished requests are
        treated as `in_flight` says (an option of `weight_updates.IN_FLIGHT`), the weights are replaced, and later
        tokens belong to `version`; None means the present version + 1. With `copy` false the engine may keep the
        caller's arrays themselves. Raise ConfigError for a wrong option, ModelLoadError for a wrong tree.
        """
        self.loop.check_outside("update_params")
        number = self.versions.check_options(version, in_flight, copy)
        with engine_settings():
            held = {".".join(map(str, path)): leaf for path, leaf in self.runner.store.by_path.items()}
            checked = self.live().check(params, held)
            self.loop.drain(in_flight)
            self.runner.store.update(self.live(), checked, self.loop.plan.get, copy=copy)
            self.versions.advance(number)
            # Kept pages are read by the scales that they were written with; an engine that sleeps has none.
            if in_flight != "keep" or not self.runner.has_state:
                self.runner.measure_page_scales()
        self.thread.serve()  # An engine that slept without weights may go on.

    def sleep(self, level: int, mode: str) -> None:
        """Free the device's memory for other uses until `wake_up`, after treating requests as `mode` says.

        Runs between steps. Raise ConfigError if an argument is wrong or the engine sleeps already.
        """
        self.loop.check_outside("sleep")
        self.sleeping.check(level, mode)
        self.loop.drain(mode)
        self.loop.core.restart()  # Requests keep their tokens and give up their pages.
        self.sleeping.begin(level)

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Take back the memory that `sleep` has freed."""
        self.loop.check_outside("wake_up")
        self.sleeping.end(tags)
        self.thread.serve()
