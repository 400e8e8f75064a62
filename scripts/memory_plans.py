"""Plan the memory of public models on chips, from their config.json alone: no weights, and no such chip.

    python scripts/memory_plans.py --output docs/measurements/memory_plans.json    # prints a row per model and chip
    python scripts/memory_plans.py --markdown                                      # the tables of docs/memory_plans.md

A plan is the one that a start with default options and bfloat16 makes on one such chip with all of its memory free; for
models that fit on none, on 8 devices. It is an estimate: no program is compiled and nothing is allocated. The configs
are those of `tests/public_configs`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests" / "public_configs"
CONTEXT_LEN = 8192
"""Tokens of the sequences that are counted; those of a model with a shorter context have its longest."""
MANY_DEVICES = 8
"""Devices of the plans of models that fit on no single one."""
HOST_BYTES = 64 * 10**9


class Chip(NamedTuple):
    """A chip as the plans see it."""

    platform: str
    memory_gb: int
    """Nominal memory in 10^9 bytes; a v7x counts as two devices, of which this is one."""


CHIPS = {"v5e": Chip("tpu", 16), "v6e": Chip("tpu", 32), "v7x": Chip("tpu", 96)}
CHIPS |= {"H100": Chip("gpu", 80), "H200": Chip("gpu", 141)}
COLUMNS = (
    "devices", "parameters", "weights_bytes", "token_bytes", "page_tokens", "page_bytes", "step_bytes", "num_pages",
    "max_model_len", "max_num_seqs", "num_seqs_of_8k",
)  # fmt: skip
"""What a plan says, in bytes of one device: `token_bytes` are the pages of a sequence of 8,192 tokens ÷ its tokens, and
`num_seqs_of_8k` such sequences fit into the pool at once. Layers with a window hold its pages and those of a step,
which a chunk of a prompt may fill."""


def read_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, content of config.json) of each committed model of a family that is served."""
    from jpaged.models.families.table import BY_ARCHITECTURE

    for path in sorted(CONFIGS.glob("*.json"), key=lambda path: path.name.lower()):
        config = json.loads(path.read_text())["config"]
        if config["architectures"][0] in BY_ARCHITECTURE:
            yield path.stem.replace("__", "/"), config


def backend_of(name: str, chip: Chip, shape: Any) -> Any:
    """Return the attention backend that serves a model of this shape on the chip by default, or one with its pages."""
    from jpaged.pallas_kernels.ragged_paged_attention.tpu.backend import TpuBackend
    from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend

    if chip.platform == "gpu":
        # The pages of pallas-gpu have the same shapes, but its backend cannot be made with every version of JAX.
        return XlaBackend(platform="gpu")
    backend = TpuBackend.for_heads(name, shape.num_heads, shape.head_size)
    try:
        backend.layout(shape.kv_shape(backend.block_sizes[0]))
    except ValueError:
        return XlaBackend(platform="tpu")
    return backend


def plan(config: dict[str, Any], chip_name: str, num_devices: int = 1) -> dict[str, Any]:
    """Return the plan of a model on devices of one chip: its `COLUMNS`, or the line of a refused start, as `refused`.

    The process needs `num_devices` CPU devices, virtual ones for more than one.
    """
    import jax

    from jpaged import ConfigError, EngineConfig
    from jpaged.models.opening.reading import config_from_hf
    from jpaged.models.weights.loading import tensor_shapes
    from jpaged.sampling.logit_rules_spec import LogitRulesSpec
    from jpaged.sharding import device_mesh
    from jpaged.startup.abstract_engine import AbstractEngine
    from jpaged.startup.attention.choice import attention_shape
    from jpaged.startup.sizing.sizes import FreeMemory, size_engine

    chip, model = CHIPS[chip_name], config_from_hf(config, Path("config.json"))
    model = model.without_idle_windows(model.max_context_len)  # As an engine does.
    backend = backend_of(chip_name, chip, attention_shape(model.spec_on_chip(num_devices), "bfloat16"))
    # The mesh is of CPU devices: the plan asks them for nothing, and their memory is not looked at.
    mesh = device_mesh(jax.devices("cpu")[:num_devices])
    engine = AbstractEngine(model, mesh, backend, LogitRulesSpec(model.vocab_size))
    num_parameters = sum(map(math.prod, tensor_shapes(model, mesh).values()))
    of_model = {"devices": num_devices, "parameters": num_parameters}
    of_model |= {"weights_bytes": engine.weights_bytes("bfloat16")}
    free = FreeMemory(chip.platform, chip.memory_gb * 10**9, HOST_BYTES)
    try:
        on_chip = model.spec_on_chip(num_devices, backend.layer_ops)
        sizes = size_engine(EngineConfig(dtype="bfloat16"), on_chip, engine, free)
    except ConfigError as refusal:
        return {**of_model, "refused": str(refusal)}
    step, num_pages = sizes.step, sizes.num_blocks - 1
    page_bytes = engine.page_bytes(step.block_size, step.kv_cache_dtype)
    context_len = min(CONTEXT_LEN, step.max_model_len)
    pages_of_8k = sizes.arithmetic.max_pages(0, [context_len])
    return {
        **of_model,
        "token_bytes": pages_of_8k * page_bytes // context_len,
        "page_tokens": step.block_size,
        "page_bytes": page_bytes,
        "step_bytes": sizes.memory.step_bytes,
        "num_pages": num_pages,
        "max_model_len": step.max_model_len,
        "max_num_seqs": step.max_num_seqs,
        "num_seqs_of_8k": min(step.max_num_seqs, num_pages // pages_of_8k),
    }


def read_plans() -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Yield (name, plan on each of `CHIPS`) of each model, and then of those that fit on none, on several devices."""
    refused = []
    for name, config in read_configs():
        plans = {chip: plan(config, chip) for chip in CHIPS}
        yield name, plans
        if all("refused" in each for each in plans.values()):
            refused.append((name, config))
    for name, config in refused:
        yield name, {chip: plan(config, chip, MANY_DEVICES) for chip in CHIPS}


def print_markdown(found: list[tuple[str, dict[str, dict[str, Any]]]]) -> None:
    """Print the tables of docs/memory_plans.md: of one device, and of several."""
    for num_devices in (1, MANY_DEVICES):
        heads = ["model", "parameters, 10⁹", "weights, GB", "KV, kB a token", *CHIPS]
        print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
        rows = (markdown_row(*each) for each in found if next(iter(each[1].values()))["devices"] == num_devices)
        print("\n".join(rows), end="\n\n")


def markdown_row(name: str, plans: dict[str, dict[str, Any]]) -> str:
    """Return a model's row of a table in docs/memory_plans.md."""
    fitting = [each for each in plans.values() if "refused" not in each]
    of_model = next(iter(plans.values()))
    cells = [name, f"{of_model['parameters'] / 1e9:.3g}", f"{of_model['weights_bytes'] / 1e9:.3g}"]
    cells.append(f"{min(each['token_bytes'] for each in fitting) / 1e3:.3g}" if fitting else "")
    for each in plans.values():
        cells.append("—" if "refused" in each else f"{each['max_model_len']:,} · {each['num_seqs_of_8k']}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/memory_plans.md")
    parser.add_argument("--output", type=Path, help="write the plans here, as JSON")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={MANY_DEVICES}"
    found = list(read_plans())
    if args.markdown:
        print_markdown(found)
    else:
        print("model", "chip", *COLUMNS, sep="\t")
        for name, plans in found:
            for chip, each in plans.items():
                print(name, chip, *([each["refused"]] if "refused" in each else map(each.get, COLUMNS)), sep="\t")
    if args.output:
        chips = {name: chip._asdict() for name, chip in CHIPS.items()}
        rows = [{"model": name, "chip": chip, **each} for name, plans in found for chip, each in plans.items()]
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)  # A line each.
        head = json.dumps({"date": str(date.today()), "dtype": "bfloat16", "chips": chips})
        args.output.write_text(f'{head[:-1]},\n "plans": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
