"""The Pallas call that the TPU kernels share.

A kernel is a function of references in VMEM, SMEM and HBM. It runs once per grid step, and the grid steps of one call
run in order on one core. Records of references are NamedTuples; the call takes the same records of arrays, of block
specifications and of scratch types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from .lanes import Ref

IN_HBM, IN_SMEM = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.SMEM)


class CallOptions(NamedTuple):
    """How a kernel is compiled or interpreted."""

    vmem_bytes: int
    """VMEM of a core, in bytes: no kernel may ask for more."""
    interpret: Any = False
    """`pltpu.InterpretParams` to interpret the kernel on any platform, else False."""
    check_bounds: bool = False
    """Whether a TPU stops at a copy beyond its memory, which takes time."""


def call_kernel(
    kernel: Callable[..., None],
    scalars: NamedTuple,
    inputs: NamedTuple,
    in_specs: NamedTuple,
    scratch: NamedTuple,
    *,
    outputs: tuple[str, ...],
    num_steps: Ref,
    vmem_bytes: int,
    name: str,
    call: CallOptions,
) -> list[Array]:
    """Call `kernel(scalars, inputs, *outputs, scratch)` for each of `num_steps` grid steps, and return the outputs.

    The arguments are records: `scalars` of int32 arrays, `inputs` of arrays or None, `in_specs` of their block
    specifications, `scratch` of scratch types. `outputs` names fields of `inputs`: each output has the shape and block
    specification of that input and takes its memory, so the caller must not use the input again. Inputs that are not in
    SMEM are kept in HBM: XLA may otherwise place an operand in the VMEM that the kernel counts on. `vmem_bytes` is the
    VMEM that the kernel needs; the limit given to the compiler is at most the chip's. `name` is the kernel's name in
    profiles.

    Grid steps run in order. There is at least one, also if `num_steps` is 0: what a TPU does with the windows of an
    empty grid is not documented. In that step the kernel must write each output's window, and touch nothing else.
    """
    # Operands are numbered, for `input_output_aliases`, after the scalars and without the inputs that are None.
    present = [field for field, array in inputs._asdict().items() if array is not None]
    pinned = [field for field in present if getattr(in_specs, field).memory_space is not pltpu.SMEM]
    inputs = inputs._replace(
        **{field: pltpu.with_memory_space_constraint(getattr(inputs, field), pltpu.HBM) for field in pinned}
    )
    arrays = [getattr(inputs, field) for field in outputs]
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(jnp.maximum(num_steps, 1),),
            in_specs=[in_specs],
            out_specs=[getattr(in_specs, field) for field in outputs],
            scratch_shapes=[scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        input_output_aliases={len(scalars) + present.index(field): index for index, field in enumerate(outputs)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=not call.check_bounds,
            vmem_limit_bytes=min(vmem_bytes, call.vmem_bytes),
        ),
        interpret=call.interpret,
        name=name,
    )(scalars, inputs)
