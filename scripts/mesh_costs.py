"""Compare engines over meshes, compiled for chips that are not here, with formulas: bytes on a chip, and collectives.

    python scripts/mesh_costs.py --output docs/measurements/mesh_costs.json    # all, 7 minutes; exit 1 beyond 5 %
    python scripts/mesh_costs.py llama-70b:v5e:16                              # one of them
    python scripts/mesh_costs.py --markdown < docs/measurements/mesh_costs.json    # the table of docs/meshes.md

The formulas know a model's sizes and the number of chips, and nothing of this project. What the compiler counts comes
from models of two and four layers, in bfloat16, since layers add up; Llama 3 8B is compiled whole beside that, which
shows it. The step decodes 256 rows and draws their tokens. Needs the wheels of the extra `aot`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from compile_families import CONFIGS, compile_model, write_report

GEMMA_27B = {
    "architectures": ["Gemma3ForCausalLM"], "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 262144,
    "query_pre_attn_scalar": 168, "sliding_window": 1024, "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
}  # fmt: skip
"""Sizes of google/gemma-3-27b-it's text model, from github.com/AI-Hypercomputer/maxtext, hf_model_configs.py."""
NUM_ROWS = 256
BYTES = 2
"""Bytes of a number in bfloat16."""
TOLERANCE = 0.05
FIGURES = ("weights_bytes", "token_bytes", "all_reduces", "reduced", "all_gathers", "gathered")
"""Bytes of the weights on a chip; bytes of a token's keys and values there, in the layers that share a page; and of a
step the collectives, and the numbers that each of them returns. Bytes may differ by TOLERANCE, counts not at all."""


class Model(NamedTuple):
    """What the formulas know of a model."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    tables: int
    """Matrices of the vocabulary: one if input and output share it."""
    norms: int
    """Values of a layer's norms, which every chip has."""
    layers_of_a_page: int
    """Layers whose keys and values lie in one page: those of the largest page-table group."""
    config: dict[str, Any]


def public(name: str) -> dict[str, Any]:
    """Return the config.json of a public model."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())["config"]
    return config


MODELS = {
    "llama-8b": Model(4096, 14336, 32, 32, 8, 128, 128256, 2, 2 * 4096, 32, public("meta-llama__Llama-3.1-8B")),
    "gemma-27b": Model(5376, 21504, 62, 32, 16, 128, 262144, 1, 4 * 5376 + 2 * 128, 13, GEMMA_27B),
    "llama-70b": Model(
        8192, 28672, 80, 64, 8, 128, 128256, 2, 2 * 8192, 80, public("meta-llama__Llama-3.3-70B-Instruct")
    ),
}
CELLS = (
    *((name, chip, 8) for name in ("llama-8b", "gemma-27b") for chip in ("v5e", "v6e", "h100")),
    ("llama-70b", "v6e", 8), ("llama-70b", "v5e", 16), ("llama-70b", "h100", 8),
)  # fmt: skip
WHOLE = "llama-8b"
"""The model that is compiled with all of its layers too."""


def predicted(model: Model, num_chips: int) -> dict[str, float]:
    """Return the FIGURES by formula.

    A layer has projections of queries and output [hidden, heads × head size], of keys and values [hidden, KV heads ×
    head size], and three matrices of the MLP; all are split evenly. If there are fewer KV heads than chips, each chip
    has a copy of one. Sums over the chips follow each output projection, each MLP and the embedding.
    """
    stored_kv_heads = max(model.kv_heads, num_chips)
    of_attention = 2 * model.hidden * model.head_size * (model.heads + stored_kv_heads)
    split = model.layers * (of_attention + 3 * model.hidden * model.inner) + model.tables * model.vocab * model.hidden
    return {
        "weights_bytes": BYTES * (split / num_chips + model.layers * model.norms + model.hidden),
        "token_bytes": BYTES * 2 * model.layers_of_a_page * model.head_size * stored_kv_heads / num_chips,
        "all_reduces": 2 * model.layers + 1,
        "reduced": NUM_ROWS * model.hidden,
        "all_gathers": 1,
        "gathered": NUM_ROWS * model.vocab,
    }


def compiled(config: dict[str, Any], chip: str, num_chips: int, num_layers: int) -> dict[str, Any]:
    """Return what the compiler says of the step of the model with so many layers."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"config": config}, file)
        file.flush()
        found = compile_model(Path(file.name), chip, num_chips, num_layers)
    if "error" in found:
        raise SystemExit(f"mesh_costs: {chip} × {num_chips}, {num_layers} layers: {found['error']}")
    (step,) = next(reports for name, reports in found["steps"].items() if name.startswith("decode "))
    kinds = step["collectives"]
    strange = [f"an {kind}" for kind in sorted(kinds.keys() - {"all-reduce", "all-gather"})]
    return {
        "backend": found["backend"],
        "weights_bytes": step["arguments"] - step["cache"] - step["hidden"],
        # The plan's bytes of a page of all layers, as the compiler rounds those of the cut model's cache.
        "token_bytes": found["page_bytes"] / step["page_tokens"] * (step["aliased"] - step["hidden"]) / step["cache"],
        "all_reduces": len(kinds.get("all-reduce", ())),
        "reduced": [size for size, _ in kinds.get("all-reduce", ())],
        "all_gathers": len(kinds.get("all-gather", ())),
        "gathered": [size for size, _ in kinds.get("all-gather", ())],
        "dtypes": {kind: dict(Counter(dtype for _, dtype in results)) for kind, results in sorted(kinds.items())},
        "strange": strange + step["large"],
        "temporary": step["temporary"],
    }


def measure(name: str, chip: str, num_chips: int) -> dict[str, Any]:
    """Return a cell's figures by formula and by the compiler, and what is wrong with it, a clause each."""
    model, formula = MODELS[name], predicted(MODELS[name], num_chips)
    two, four = (compiled(model.config, chip, num_chips, num_layers) for num_layers in (2, 4))
    faults = [f"a step has {what}" for what in two["strange"] + four["strange"]]

    def at(num_layers: int, figure: str) -> float:
        return float(two[figure] + (num_layers - 2) / 2 * (four[figure] - two[figure]))

    found: dict[str, float] = {figure: at(model.layers, figure) for figure in ("weights_bytes", "all_reduces")}
    found |= {figure: max(two[figure], four[figure]) for figure in ("token_bytes", "all_gathers")}
    for figure in ("reduced", "gathered"):
        sizes = {*two[figure], *four[figure]}
        if len(sizes) != 1:
            faults.append(f"{figure}: {sorted(sizes)}, wanted one size")
        found[figure] = max(sizes, default=0)
    faults += [
        f"{figure}: {found[figure]:g} compiled, {formula[figure]:g} by formula"
        for figure in FIGURES
        if abs(found[figure] / formula[figure] - 1) > (TOLERANCE if figure.endswith("bytes") else 0)
    ]
    cell = {"model": name, "chip": chip, "chips": num_chips, "backend": two["backend"]}
    cell["dtypes_of_four_layers"] = four["dtypes"]
    cell |= {"formula": formula, "compiled": {figure: found[figure] for figure in FIGURES}}
    if name == WHOLE:
        whole = compiled(model.config, chip, num_chips, model.layers)
        cell["whole"] = {figure: whole[figure] for figure in ("weights_bytes", "all_reduces", "temporary")}
        faults += [
            f"{figure}: {whole[figure]} with all layers, {found[figure]:g} from two and four"
            for figure in ("weights_bytes", "all_reduces")
            if abs(whole[figure] / found[figure] - 1) > 1e-3
        ]
    return {**cell, "faults": faults}


def markdown(cells: list[dict[str, Any]]) -> str:
    """Return the table of docs/meshes.md: what the compiler counts, and in brackets ÷ the formula."""
    heads = ["model", "chips", "weights, GB a chip", "KV, bytes a token a chip", "all-reduces", "all-gathers"]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for cell in cells:
        found = cell["compiled"]
        ratio = {figure: found[figure] / cell["formula"][figure] for figure in FIGURES}
        weights = f"{found['weights_bytes'] / 1e9:.2f} ({ratio['weights_bytes']:.3f})"
        token = f"{found['token_bytes']:,.0f} ({ratio['token_bytes']:.3f})"
        counts = f"{found['all_reduces']:g}", f"{found['all_gathers']:g}"
        row = [cell["model"], f"{cell['chips']} × {cell['chip']}", weights, token, *counts]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> int:
    names = [":".join(map(str, cell)) for cell in CELLS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--markdown", action="store_true", help="print the table of a report on stdin")
    parser.add_argument("--output", type=Path, help="write the report here, as JSON")
    args = parser.parse_args()
    if args.markdown:
        print(markdown(json.load(sys.stdin)["rows"]))
        return 0
    if unknown := [cell for cell in args.cells if cell not in names]:
        parser.error(f"got {unknown[0]}, allowed: {', '.join(names)}")
    try:
        versions = {name: version(name) for name in ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin")}
    except PackageNotFoundError as missing:
        parser.error(f"{missing.name} is not installed: pip install -e '.[aot]'")
    report: list[dict[str, Any]] = []
    for name, cell in zip(names, CELLS, strict=True):
        if args.cells and name not in args.cells:
            continue
        report.append(measure(*cell))
        print(f"{name}: {'; '.join(report[-1]['faults']) or 'as the formulas say'}", flush=True)
        if args.output:
            write_report(args.output, {"versions": versions}, report)
    return int(any(one["faults"] for one in report))


if __name__ == "__main__":
    sys.exit(main())
