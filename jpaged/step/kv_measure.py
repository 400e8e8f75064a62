"""The scales of pages of one byte a number: a copy of them on the host, and the program that measures their ranges.

The program runs the model over a fixed text, without pages. Parts of the text begin at positions that are spread over
the engine's context: rotary embeddings turn slow channels of keys only over thousands of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..checks import one_line
from ..errors import ConfigError
from ..models.config.spec import AttentionLayer
from ..models.inputs import ModelInputs, unpaged_inputs
from ..models.kv_ranges import ChannelRanges, RangeRecorder, scales_of
from ..models.weights.weights import Weights
from ..pallas_kernels.ragged_paged_attention.interface import KVLayout
from ..pallas_kernels.ragged_paged_attention.kv_scales import KVScales
from .compile_plan import Key, Lower, Lowered
from .kept_programs import Program
from .model_calls import merged_model

MEASURE_KEY = ("measure_kv",)
PART_TOKENS = 128
FIRST_POSITIONS = 0, 256, 1024, 4096, 16384
"""Where parts of the text begin. The first three lie below MEAN_POSITIONS and give the means; all give the ranges."""
NUM_PARTS = len(FIRST_POSITIONS)
"""Tokens of a part of the text, unless the context is shorter, and parts."""
TEXT = """The river had been rising since Tuesday, and by the time Ana Petrova reached the bridge there was water on \
both sides of the road. "We should have left at 6:30," said her brother; he had said it twice before. In 1953, 1974 \
and 2002 the town had been flooded to the second floor; the marks are still on the wall of the school.

def mean(values: list[float]) -> float:
    \"\"\"Return the mean of the values; 0.0 if there are none.\"\"\"
    total = 0.0
    for index, value in enumerate(values):
        total += value  # Kahan's sum would be more exact.
    return total / len(values) if values else 0.0

| item | price (EUR) | in stock |
|------|-------------|----------|
| lamp | 49.90       | yes      |
| desk | 1,299.00    | no       |

Frage: Wie weit ist es vom Bahnhof bis zum Rathaus? Antwort: Ungefähr 800 Meter, zehn Minuten zu Fuß. La bibliothèque \
est fermée le lundi. El examen será mañana a las nueve. 水は百度で沸騰する。 Вода кипит при ста градусах.

To solve x² − 5x + 6 = 0, factor it as (x − 2)(x − 3) = 0; hence x = 2 or x = 3. The derivative of sin(x)·eˣ is \
(sin x + cos x)·eˣ by the product rule. Water is H₂O; table salt is NaCl.

{"name": "kettle", "tags": ["kitchen", "steel"], "size": {"w": 21.5, "h": 24}, "sold": false, "rating": null}

User: Summarize the meeting in one sentence, please.
Assistant: The team agreed to move the release to 14 March, to drop the old importer, and to ask two customers for a \
test of the new one before the end of the month. Let me know if you would like a list of the open questions!"""


def measured_tokens(
    encode: Callable[[str], Sequence[int]] | None, vocab_size: int, max_context_len: int
) -> tuple[Int[np.ndarray, " T"], Int[np.ndarray, " T"]]:
    """Return the token ids and the positions of the text's parts, T = NUM_PARTS × PART_TOKENS of them, int32.

    `encode` makes ids of a text; without it, or if the text has no token that the model knows, ids are drawn at random.
    A text of too few tokens is repeated. Each part begins with the text's first token, as every prompt does. Parts
    begin at FIRST_POSITIONS, or as far as the model's own `max_context_len` reaches, which does not depend on how many
    tokens an engine serves.
    """
    part_len = min(PART_TOKENS, max_context_len)
    ids = [] if encode is None else [token_id for token_id in encode(TEXT) if token_id < vocab_size]
    if not ids:
        ids = np.random.default_rng(0).integers(0, vocab_size, NUM_PARTS * part_len).tolist()
    first, others = ids[0], np.resize(ids[1:] or ids, NUM_PARTS * (part_len - 1)).reshape(NUM_PARTS, part_len - 1)
    parts = np.concatenate([np.full((NUM_PARTS, 1), first), others], axis=1)
    last = max_context_len - part_len
    # A part that began where the one before ends, at a multiple of PART_TOKENS, would continue it.
    begins = np.minimum(FIRST_POSITIONS, max(0, last - (last % PART_TOKENS == 0)))
    positions = begins[:, None] + np.arange(part_len)[None]
    return parts.reshape(-1).astype(np.int32), positions.reshape(-1).astype(np.int32)


def measure_program(weights: Weights, layout: KVLayout, layers: tuple[AttentionLayer, ...], num_tokens: int) -> Program:
    """Return the program (weights, (), ids, positions) → ((), ranges), which has no state.

    The ranges are the four arrays of `ChannelRanges`, of keys and of values: float32 [2, 4, L, K, H]. The weights are a
    flat tuple of arrays, those of the abstract `weights`; ids and positions are int32 [num_tokens].
    """
    leaves, tree = jax.tree.flatten(weights.state)

    def run(leaves: tuple[Array, ...], state: tuple[()], token_ids: Array, positions: Array) -> tuple[tuple[()], Array]:
        inputs: ModelInputs = unpaged_inputs(token_ids, positions)
        recorder = RangeRecorder.new(layers, layout.num_kv_heads, layout.head_size)
        model: Any = merged_model(weights.graph, jax.tree.unflatten(tree, leaves))
        _, recorder = model(inputs, recorder)
        return state, jnp.stack([jnp.stack(recorder.keys), jnp.stack(recorder.values)])

    tokens = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    return Program("measure_kv", run, (tuple(leaves), (), tokens, tokens))


class PageScales:
    """The scales of an engine's pages. The host's copy stays while the device's state is made anew."""

    def __init__(
        self,
        layout: KVLayout,
        layers: tuple[AttentionLayer, ...],
        tokens: tuple[Int[np.ndarray, " T"], Int[np.ndarray, " T"]],
        stored: KVScales | None = None,
    ) -> None:
        """Take the ids and positions of `measured_tokens`, and the scales of the checkpoint, if it has any.

        Without these, `measure` has to be called before the scales are placed.
        """
        self._layout, self._layers, self._tokens = layout, layers, tokens
        self.scales = stored
        """Scales as numpy arrays; None until they are measured."""

    def programs(self, weights: Weights, lower: Callable[[Program], Lowered]) -> dict[Key, Lower]:
        """Return the program that measures, for abstract weights; `lower` may take a kept one.

        It raises ConfigError for a caller's own model that does not run without pages.
        """
        program = measure_program(weights, self._layout, self._layers, len(self._tokens[0]))

        def lowered() -> Lowered:
            try:
                return lower(program)
            except Exception as error:  # A caller's model may raise anything.
                fault = f"the model does not run over the text that sets scales of pages: {type(error).__name__}"
                raise ConfigError(f"kv_cache_dtype: {fault}: {one_line(error)}; set it to auto") from error

        return {MEASURE_KEY: lowered}

    def measure(self, leaves: tuple[Array, ...], program: Callable[..., Any]) -> None:
        """Run the model with these weights over the text, and keep the scales that follow from the ranges.

        `program` is the executable of MEASURE_KEY. Raises ModelLoadError, and keeps the scales from before, if a key or
        a value is not finite.
        """
        _, ranges = program(leaves, (), *self._tokens)
        keys, values = (ChannelRanges(*of_tensor) for of_tensor in np.asarray(ranges))
        self.scales = scales_of(keys, values, self._layers, self._layout.dtype)

    def placed(self, like: KVScales) -> KVScales:
        """Return the scales as new arrays on the devices, each where the array of `like` is."""
        assert self.scales is not None, "scales are measured before pages are made"
        # A CPU would alias the host's copy, which must stay as it is: the device's arrays are donated to each step.
        put = partial(jax.device_put, may_alias=False)
        return jax.tree.map(lambda scale, array: put(scale, array.sharding), self.scales, like)
