"""Where checkpoints keep the weights of a model's modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .config.experts import ExpertsConfig

Bounds = tuple[int, int]
"""Start and stop of a range of rows or columns."""


@dataclass(frozen=True)
class Source:
    """Where a checkpoint keeps the weight and the bias of one module, or of one part of a fused module."""

    name: str
    """Name of the checkpoint's module; {i} stands for the layer, {e} for an expert. The source of an expert's module
    without {e} in its name is a tensor of all experts, [E, out, in] or, of biases, [E, out]."""
    blocks: tuple[Bounds, ...] | None = None
    """Ranges of the tensor's rows [out] that make up the rows of the part, in order; None for all rows."""
    is_transposed: bool = False
    """Whether the checkpoint stores its matrix as W [in, out]."""
    step: int = 1
    """Distance of the rows of a block: gates in the rows 0, 2, 4 and 6 of 8 are the block (0, 8) with the step 2."""
    ends: Mapping[str, str] = field(default_factory=dict)
    """Name of a variable → what follows `name`; a dot and the variable's own name if it is not here."""
    others: tuple[Source, ...] = ()
    """Where other checkpoints keep them: the first one whose tensor a checkpoint holds counts, if it lacks this one."""

    def tensor(self, variable: str, numbers: Mapping[str, int], *, has_layer: bool = True) -> str:
        """Return the usual name of the tensor of a variable, such as "weight"; without its layer if not `has_layer`."""
        template = self.name if has_layer else self.name.replace("{i}.", "")
        return template.format(**numbers) + self.ends.get(variable, f".{variable}")


def other_sources(module: str, name: str, experts: ExpertsConfig | None) -> tuple[Source, ...]:
    """Return in which other forms checkpoints or trees hold a module, whose usual name is `name`.

    One tensor [E, out, in] may be that of all experts, whose name has no expert's number. Modules of transformers 5
    have such tensors, without ".weight" in their names, and gates and ups in one, gates first; and Mixtral's router has
    another name there.
    """
    if experts is None:
        return ()
    if module.endswith(".mlp.router"):
        in_memory = Source("model.layers.{i}.mlp.gate")
        return () if name == in_memory.name else (in_memory,)
    if ".{e}." not in module or ".{e}" not in name:
        return ()
    width, part = experts.width, module.rpartition(".")[2]
    blocks = {"gate_proj": ((0, width),), "up_proj": ((width, 2 * width),)}.get(part)
    joined = "model.layers.{i}.mlp.experts." + ("gate_up_proj" if blocks else part)
    return Source(name.replace(".{e}", "")), Source(joined, blocks, ends={"weight": ""})
