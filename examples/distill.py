"""Distil a teacher into a smaller student: the engine scores, files hold its most likely tokens, the student learns.

    python examples/distill.py [SEED]

The teacher is the module of own_model.py, trained for a moment on sequences that ascend by steps of 1 to 3. The student
has one layer in place of two, and learns from the teacher's 16 most likely tokens of 97 and the probability of the rest
(Hinton et al. 2015, arXiv:1503.02531).
"""

import sys
import tempfile
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from own_model import VOCAB, Tiny

from jpaged import Engine
from jpaged.models.dense import dense_logits, dense_logprobs
from jpaged.research import DistilledBatch, distill, read_distilled

TOP_K, LENGTH, SEQUENCES, BATCH, PASSES = 16, 32, 512, 32, 6


class Student(Tiny):
    """The first of the teacher's two layers, with weights of its own."""

    spec = replace(Tiny.spec, layers=Tiny.spec.layers[:1])

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.blocks = nnx.List([self.blocks[0]])


def ascending(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return sequences [count, LENGTH], each with a first token and a step of its own, modulo the vocabulary."""
    firsts, steps = rng.integers(VOCAB, size=(count, 1)), rng.integers(1, 4, size=(count, 1))
    return ((firsts + steps * np.arange(LENGTH)) % VOCAB).astype(np.int32)


@nnx.jit
def train_teacher(teacher: Tiny, optimizer: nnx.Optimizer, ids: jax.Array) -> None:
    """Take one step towards these tokens, [B, N]."""
    optimizer.update(teacher, nnx.grad(lambda model: -dense_logprobs(model, ids).mean())(teacher))


@nnx.jit
def train_student(student: Student, optimizer: nnx.Optimizer, batch: DistilledBatch) -> jax.Array:
    """Take one step, and return the loss: the mean divergence of the student from the teacher, in nats.

    It is that over the teacher's K most likely tokens and one more event, any other token.
    """

    def loss_of(student: Student) -> jax.Array:
        logprobs = jax.nn.log_softmax(dense_logits(student, batch.token_ids)[:, :-1])  # [B, N − 1, V]
        own = jnp.take_along_axis(logprobs, batch.top_token_ids, axis=-1)  # [B, N − 1, K]
        own_rest = jnp.log(jnp.maximum(1e-9, 1 - jnp.exp(own).sum(axis=-1)))
        teacher, teacher_rest = batch.top_logprobs, jnp.maximum(-30.0, batch.log_rest)  # −inf where nothing is left.
        divergence = (jnp.exp(teacher) * (teacher - own)).sum(axis=-1) + jnp.exp(teacher_rest) * (
            teacher_rest - own_rest
        )
        return (divergence * batch.mask).sum() / batch.mask.sum()

    loss, gradients = nnx.value_and_grad(loss_of)(student)
    optimizer.update(student, gradients)
    return loss


def main(seed: int = 0) -> list[float]:
    """Train teacher and student; return the student's mean loss of each pass over the files."""
    rng = np.random.default_rng(seed)
    teacher, student = Tiny(nnx.Rngs(seed)), Student(nnx.Rngs(seed + 1000))
    optimizer = nnx.Optimizer(teacher, optax.adam(3e-3), wrt=nnx.Param)
    for _ in range(100):
        train_teacher(teacher, optimizer, ascending(rng, BATCH))
    optimizer = nnx.Optimizer(student, optax.adam(3e-3), wrt=nnx.Param)
    history = []
    with tempfile.TemporaryDirectory() as directory:
        with Engine(teacher, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=LENGTH) as engine:
            counts = distill(engine, ascending(rng, SEQUENCES), directory, top_k=TOP_K, shard_tokens=4096)
        print(f"{counts.num_sequences} sequences of {counts.num_tokens // counts.num_sequences} tokens")
        for epoch in range(PASSES):
            batches = read_distilled(directory, batch_size=BATCH, seed=epoch)
            losses = [float(train_student(student, optimizer, batch)) for batch in batches]
            history.append(float(np.mean(losses)))
            print(f"pass {epoch + 1}: mean loss {history[-1]:.3f}")
    return history


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
