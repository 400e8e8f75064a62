"""Activations of MLPs in native code, for vectors of float32, by the names that config.json gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from llvmlite import ir

from ...activations import ACTIVATIONS, SWIGLU_LIMIT
from ..llvm import Code, constant


def _sigmoid(code: Code, x: ir.Value) -> ir.Value:
    """Return 1 ÷ (1 + exp(−x)) for each lane; exp(−|x|), which cannot overflow, serves for either sign of x."""
    build, one = code.build, constant(x.type, 1.0)
    is_negative = build.fcmp_ordered("<", x, constant(x.type, 0.0))
    exponential = code.exp(build.select(is_negative, x, build.fneg(x)))
    inverse = build.fdiv(one, build.fadd(one, exponential))
    return build.select(is_negative, build.fmul(exponential, inverse), inverse)


def _silu(code: Code, x: ir.Value) -> ir.Value:
    return code.build.fmul(x, _sigmoid(code, x))


def _quick_gelu(code: Code, x: ir.Value) -> ir.Value:
    return code.build.fmul(x, _sigmoid(code, code.build.fmul(x, constant(x.type, 1.702))))


def _gelu_tanh(code: Code, x: ir.Value) -> ir.Value:
    """Return x ÷ 2 × (1 + tanh(y)), which is x × sigmoid(2 y), with y = √(2 ÷ π) × (x + 0.044715 x³)."""
    build = code.build
    cubic = code.add_product(build.fmul(x, x), constant(x.type, 0.044715), constant(x.type, 1.0))
    argument = build.fmul(build.fmul(x, cubic), constant(x.type, 2 * math.sqrt(2 / math.pi)))
    return build.fmul(x, _sigmoid(code, argument))


def _relu(code: Code, x: ir.Value) -> ir.Value:
    zeros = constant(x.type, 0.0)  # A NaN is not below 0, and stays.
    return code.build.select(code.build.fcmp_ordered("<", x, zeros), zeros, x)


def _relu2(code: Code, x: ir.Value) -> ir.Value:
    positive = _relu(code, x)
    return code.build.fmul(positive, positive)


_CODE_OF = {"silu": _silu, "gelu_pytorch_tanh": _gelu_tanh, "quick_gelu": _quick_gelu, "relu": _relu, "relu2": _relu2}
"""Activation, by one of its names → code."""
NATIVE_ACTIVATIONS: Mapping[str, Callable[[Code, ir.Value], ir.Value]] = {
    name: code
    for name, function in ACTIVATIONS.items()
    for known_name, code in _CODE_OF.items()
    if function is ACTIVATIONS[known_name]
}
"""Name in config.json → code. XLA computes the activations that are not named here."""


def _clamped_swiglu(code: Code, gate: ir.Value, up: ir.Value) -> ir.Value:
    """Return gate × σ(1.702 gate) × (up + 1), with gate at most 7 and up from −7 to 7. A NaN stays."""
    limit = constant(gate.type, SWIGLU_LIMIT)
    up = code.maximum(constant(up.type, -SWIGLU_LIMIT), code.minimum(limit, up))
    return code.build.fmul(_quick_gelu(code, code.minimum(limit, gate)), code.build.fadd(up, constant(up.type, 1.0)))


NATIVE_GATES: Mapping[str, Callable[[Code, ir.Value, ir.Value], ir.Value]] = {"clamped_swiglu": _clamped_swiglu}
"""Name → code, see `activations.GATES`."""
