"""What is kept of each token of a sample as numbers: no object for a token, whatever is asked for it.

Letters: T tokens of a sample, K most likely tokens, S tokens that were asked for, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

import numpy as np
from jaxtyping import Float, Int

if TYPE_CHECKING:
    from .token_scores import TokenScores


@dataclass(eq=False, slots=True)
class TokenNumbers:
    """Numpy arrays with a row for each output token that a sample may have; None for what is not asked for.

    Rows of tokens that the sample does not have yet mean nothing. A token that is computed again overwrites its row.
    """

    logprobs: Float[np.ndarray, " T"] | None = None
    ranks: Int[np.ndarray, " T"] | None = None
    """1 for the most likely token."""
    log_masses: Float[np.ndarray, " T"] | None = None
    """The logarithm of the probability that truncation left."""
    top_token_ids: Int[np.ndarray, "T K"] | None = None
    top_logprobs: Float[np.ndarray, "T K"] | None = None
    log_rests: Float[np.ndarray, " T"] | None = None
    """The logarithm of the probability of all but the K most likely tokens."""
    asked_logprobs: Float[np.ndarray, "T S"] | None = None
    hidden: Float[np.ndarray, "T D"] | None = None

    def put(self, start: int, scores: TokenScores, rows: slice) -> None:
        """Set the rows from `start` on to these rows of the scores of a step, which are numpy arrays."""
        end = start + rows.stop - rows.start
        for name, array in self.arrays().items():
            values = getattr(scores, _SOURCES.get(name, name))[rows]
            # The step may have computed more tokens for each row than this sample asks for.
            array[start:end] = values if array.ndim == 1 else values[:, : array.shape[1]]
        if self.log_rests is not None and self.top_logprobs is not None and scores.top_logprobs is not None:
            others = scores.top_logprobs[rows, self.top_logprobs.shape[1] :]
            if others.shape[1]:
                # The first is the largest. Without it all of them may be too small for the exponential.
                log_others = others[:, 0] + np.log(np.exp(others - others[:, :1]).sum(axis=1))
                self.log_rests[start:end] = np.logaddexp(self.log_rests[start:end], log_others)

    def put_drawn(self, index: int, scores: TokenScores, row: int) -> None:
        """Set the row of one token that was drawn, from one row of the scores of a step."""
        if self.logprobs is not None:
            self.logprobs[index] = scores.logprobs[row]
        if self.log_masses is not None and scores.log_kept_masses is not None:
            self.log_masses[index] = scores.log_kept_masses[row]
        if self.top_token_ids is not None and self.top_logprobs is not None:
            num_tops = self.top_logprobs.shape[1]
            self.top_token_ids[index], self.top_logprobs[index] = scores.top(row, num_tops)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that there are, by their names."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in named.items() if array is not None}

    def copy(self) -> Self:
        """Return the same with arrays of its own, for a sample that goes on from this one."""
        return type(self)(**{name: array.copy() for name, array in self.arrays().items()})


_SOURCES = {"log_masses": "log_kept_masses"}
"""Name of the field of `TokenScores` where it is another."""
