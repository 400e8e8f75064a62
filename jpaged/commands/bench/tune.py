"""`jpaged tune`: find the best tile sizes of the TPU kernels for a shape. A table keeps them for later starts.

    jpaged tune --num-heads 32 --num-kv-heads 8 --head-size 128                      # on a TPU: by time
    jpaged tune --num-heads 32 --num-kv-heads 8 --head-size 128 --source bundles --chip v6e      # anywhere: by bundles

One size after another is tried with the others held, starting from what a start would take now. Sizes that are better
by more than `MIN_GAIN` become an entry of the user's table, which a start reads beside our own. Bundles (`bundles.py`)
do not tell what waits for memory, so they leave alone how many tokens are fetched together.
"""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...checks import check, one_line, one_of, or_none, refusal
from ...errors import ConfigError
from ..flags import FlagParser, check_positive
from ..progress import say
from .bundles import SPILLS, TOPOLOGIES, Compiler, DecodeLoops, bundles_of_prompt, page_layout, prepare

if TYPE_CHECKING:
    from ...pallas_kernels.ragged_paged_attention.tpu.backend import TpuBackend
    from ...pallas_kernels.ragged_paged_attention.tpu.sizes import TpuShape, TpuSizes, TunedEntry

MIN_GAIN = 0.02
"""Smallest saving, as a share of a kernel's cost, that is worth an entry."""
DTYPES = ("bfloat16", "float32")
FACTORS = (0.25, 0.5, 2.0, 4.0)
"""Factors of a size that are tried in its place."""
DECODE_SIZES, PREFILL_SIZES = ("max_rows", "full", "tail", "tile", "buffers"), ("sub_kv", "tile_kv")
FETCHED = ("tile", "buffers", "tile_kv")
CONTEXT_LENS, PROMPT_LENS = (100, 1000, 8000), (1024, 8192)
DECODES = {100: (64, 16), 1000: (64, 4), 8000: (16, 2)}
"""Context length → rows and layers that are timed where `MAX_BYTES` allow them, as they do for 8 heads of 128."""
MAX_BYTES = 1 << 30
"""Bytes of pages of one workload; each of up to five candidates holds such pages, on chips of 16 GB."""

Figures = dict[str, float]


class Source(Protocol):
    """Says what the kernels cost with given sizes."""

    name: str
    unit: str
    sees_copies: bool
    """Whether costs include the time that kernels wait for memory."""

    def figures(self, kind: str, candidates: Sequence[TpuSizes]) -> list[Figures | str]:
        """Return the costs of `kind`, decode or prefill, at each of these sizes, or why they cannot be had."""


class Bundles:
    """Costs by the compiler's schedule, in VLIW bundles."""

    name, unit, sees_copies = "bundles", "bundles", False

    def __init__(self, compiler: Compiler, shape: TpuShape):
        self.compiler, self.shape = compiler, shape
        self.known: dict[tuple[str, TpuSizes], Figures | str] = {}
        self.most_spills: int | None = None
        """Registers spilled in decode's innermost loops with the first sizes, those that a start would take."""

    def figures(self, kind: str, candidates: Sequence[TpuSizes]) -> list[Figures | str]:
        """Return the costs at each of these sizes; equal sizes are compiled once."""
        for sizes in candidates:
            if (kind, sizes) not in self.known:
                self.known[kind, sizes] = self._figures(kind, sizes)
        return [self.known[kind, sizes] for sizes in candidates]

    def _figures(self, kind: str, sizes: TpuSizes) -> Figures | str:
        backend = _backend(self.compiler.chip, self.shape, sizes)
        try:
            decode, prefill = self.compiler.attention_loops(backend, self.shape)
            if kind == "decode":
                loops = DecodeLoops.of(decode, self.shape, sizes.decode)
                spills = loops.full.slots[SPILLS] + loops.tail.slots[SPILLS]
                if self.most_spills is None:
                    self.most_spills = spills
                if spills > self.most_spills:
                    return f"spills {spills} registers in its innermost loops"
                return {f"row of {n}": loops.bundles_of_row(n, sizes.decode) for n in CONTEXT_LENS}
            return {
                f"prompt of {n}": bundles_of_prompt(prefill, n, self.shape, sizes, backend.tile_q) for n in PROMPT_LENS
            }
        except Exception as error:
            return _reason(error)


class Measured:
    """Costs by time on this TPU, in ms; runs of the candidates are interleaved."""

    name, unit, sees_copies = "measured", "ms", True

    def __init__(self, chip: str, shape: TpuShape, num_runs: int):
        self.chip, self.shape, self.num_runs = chip, shape, num_runs

    def backend(self, sizes: TpuSizes) -> TpuBackend:
        """Return the kernels' backend with these sizes on this chip."""
        return _backend(self.chip, self.shape, sizes)

    def workloads(self, kind: str) -> dict[str, Any]:
        """Return what is timed, by name."""
        from .kernels import Workload

        heads = {name: getattr(self.shape, name) for name in ("num_heads", "num_kv_heads", "head_size")}
        if kind == "decode":
            found = {n: self._fitting(n, *most) for n, most in DECODES.items()}
            return {f"rows of {n}": Workload(rows, n, layers, **heads) for n, (rows, layers) in found.items()}
        found = {n: self._fitting(n, 1, 2) for n in PROMPT_LENS}
        return {f"prompt of {n}": Workload(1, n, layers, query_len=n, **heads) for n, (_, layers) in found.items()}

    def _fitting(self, context_len: int, num_rows: int, num_layers: int) -> tuple[int, int]:
        """Halve layers, then rows, until their pages take `MAX_BYTES` at most or one of each is left."""
        row_bytes = -(-context_len // self.shape.page_size) * _page_bytes(self.chip, self.shape)
        while num_rows * num_layers > max(1, MAX_BYTES // row_bytes):
            num_rows, num_layers = (num_rows, num_layers // 2) if num_layers > 1 else (num_rows // 2, 1)
        return num_rows, num_layers

    def figures(self, kind: str, candidates: Sequence[TpuSizes]) -> list[Figures | str]:
        """Return the median times at each of these sizes, or the error of sizes that cannot be compiled or run."""
        from .kernels import measure, paged

        found: list[Figures | str] = [{} for _ in candidates]
        for name, workload in self.workloads(kind).items():
            programs = {}
            for index, sizes in enumerate(candidates):
                if isinstance(found[index], str):
                    continue
                try:
                    program = paged(self.backend(sizes), workload, self.shape.page_size, self.shape.dtype)
                    program.time()  # A program may compile and yet fail to run.
                except Exception as error:
                    found[index] = _reason(error)
                else:
                    programs[str(index)] = program
            try:
                measure(programs, self.num_runs)
            except Exception as error:  # Each program ran alone, so it is not known which one is at fault.
                return [_reason(error)] * len(candidates)
            for index, figures in enumerate(found):
                if isinstance(figures, dict):
                    figures[name] = programs[str(index)].ms
        return found


class Tuned(NamedTuple):
    """The sizes that were found, and the costs of both kernels before and after."""

    sizes: TpuSizes
    before: Figures
    after: Figures


def search(chip: str, shape: TpuShape, source: Source, start: TpuSizes) -> Tuned:
    """Search the best sizes from `start` on; a kernel's sizes stay unless others gain more than `MIN_GAIN`."""
    best, before, after = start, Figures(), Figures()
    for kind, names in (("decode", DECODE_SIZES), ("prefill", PREFILL_SIZES)):
        first: Figures | None = None
        last: Figures = {}
        trial = best
        for name in names:
            if name in FETCHED and not source.sees_copies:
                continue
            candidates = [trial, *other_sizes(chip, shape, trial, name)]
            costs = dict(zip(candidates, source.figures(kind, candidates), strict=True))
            held = costs[trial]
            if isinstance(held, str):
                raise ConfigError(f"tune: {held}, with sizes that a start would take: {trial}")
            first = first or held
            for sizes, figures in costs.items():
                cost = figures if isinstance(figures, str) else f"{_cost(figures, first):.4f} of the first"
                say(f"{kind}: {name} {_size(sizes, name)}: {cost}")
            known = {sizes: figures for sizes, figures in costs.items() if isinstance(figures, dict)}
            trial = min(known, key=lambda sizes: _cost(known[sizes], held))
            last = known[trial]
        assert first is not None
        if _cost(last, first) >= 1 - MIN_GAIN:
            last, trial = first, best
        best, before, after = trial, before | first, after | last
    return Tuned(best, before, after)


def other_sizes(
    chip: str, shape: TpuShape, sizes: TpuSizes, name: str, factors: Sequence[float] = FACTORS
) -> list[TpuSizes]:
    """Return the sizes with `name` times each of `factors`, as far as the kernels could work with them."""
    from ...pallas_kernels.ragged_paged_attention.tpu.sizes import check_sizes

    found = []
    for factor in factors:
        change: dict[str, Any] = {name: int(_size(sizes, name) * factor)}
        if name in DECODE_SIZES:
            change = {"decode": sizes.decode._replace(**change)}
        other = sizes._replace(**change)
        with suppress(ValueError):
            check_sizes(chip, shape, other)
            found.append(other)
    return found


def _size(sizes: TpuSizes, name: str) -> int:
    """Return the size of that name, of the prefill kernel or of decode."""
    return getattr(sizes if name in PREFILL_SIZES else sizes.decode, name)


def _cost(figures: Figures, of: Figures) -> float:
    """Return the geometric mean of the ratios of the figures to those of `of`."""
    return math.exp(sum(math.log(figures[name] / of[name]) for name in of) / len(of))


def _backend(chip: str, shape: TpuShape, sizes: TpuSizes | None = None) -> TpuBackend:
    """Return the kernels' backend for the shape, with these sizes or, without any, those that a start takes."""
    from ...pallas_kernels.ragged_paged_attention.tpu.backend import TpuBackend

    return replace(TpuBackend.for_heads(chip, shape.num_heads, shape.head_size), sizes=sizes)


def _page_bytes(chip: str, shape: TpuShape) -> int:
    """Return the bytes of a page in one layer; ValueError if the kernels do not take the shape."""
    return page_layout(_backend(chip, shape), shape).page_bytes


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error, 200)}"


def write_entry(table: Path, entry: dict[str, Any]) -> None:
    """Put an entry into a table in place of one for the same chip and shape. The table changes in one atomic step."""
    entries = json.loads(table.read_text()) if table.exists() else []
    others = [old for old in entries if any(old[key] != entry[key] for key in ("chip", "shape"))]
    temporary = table.with_suffix(".unfinished")
    temporary.write_text(json.dumps([*others, entry], indent=1) + "\n")
    temporary.replace(table)


def main(argv: Sequence[str]) -> int:
    """Tune one attention shape: progress goes to stderr, the result to the tuning table."""
    about = "the best tile sizes of the TPU kernels for a shape, found and written down for the next start."
    parser = FlagParser(prog="jpaged tune", description=f"`jpaged tune`: {about}", allow_abbrev=False)
    for name in ("num-heads", "num-kv-heads", "head-size"):
        parser.add_argument(f"--{name}", type=int, required=True, metavar="N", help="of the model, on one chip")
    parser.add_argument("--dtype", default="bfloat16", help=f"of the pages: one of {', '.join(DTYPES)}")
    parser.add_argument("--block-size", type=int, default=128, metavar="N", help="tokens per page; default 128")
    parser.add_argument("--source", default="measured", help="measured, on a TPU, or bundles; default measured")
    parser.add_argument("--chip", help=f"with --source bundles: one of {', '.join(TOPOLOGIES)}")
    parser.add_argument("--runs", type=int, default=7, help="interleaved runs of what is measured; medians count")
    parser.add_argument("-o", "--output", type=Path, help="write to this table instead of the user's")
    args = parser.parse_args(argv)
    _check(args)
    if args.source == "measured":
        return _tune(args, _chip_here(args), None)
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError('--source: got bundles, which needs the compiler for TPUs; python -m pip install ".[aot]"')
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        return _tune(args, args.chip, Compiler(args.chip, folder))


def _check(args: Namespace) -> None:
    """Refuse flags that no search can take."""
    check_positive(args, "num_heads", "num_kv_heads", "head_size", "block_size", "runs")
    if args.num_heads % args.num_kv_heads:
        allowed = f"multiples of --num-kv-heads, {args.num_kv_heads}"
        raise refusal("--num-heads", args.num_heads, allowed, error=ConfigError)
    check("--dtype", args.dtype, one_of(*DTYPES), error=ConfigError)
    check("--source", args.source, one_of("measured", "bundles"), error=ConfigError)
    check("--chip", args.chip, or_none(one_of(*TOPOLOGIES)), error=ConfigError)
    if args.source == "bundles" and args.chip is None:
        raise refusal("--chip", "none with --source bundles", ", ".join(TOPOLOGIES), error=ConfigError)


def _chip_here(args: Namespace) -> str:
    """Return the name of this machine's TPU; ConfigError if it is none, or not the one of `--chip`."""
    import jax

    from ...pallas_kernels.ragged_paged_attention.tpu.backend import TPU_CHIPS

    device = jax.devices()[0]
    if device.platform != "tpu":
        way_out = f"use --source bundles --chip {args.chip or 'v6e'}"
        raise ConfigError(f"--source: got measured, which needs a TPU, this is a {device.platform}; {way_out}")
    chip = TPU_CHIPS.get(device.device_kind)
    if chip is None or args.chip not in (None, chip):
        fault = f"got {args.chip} and a {device.device_kind}, the kernels have sizes for {', '.join(TPU_CHIPS)}"
        raise ConfigError(f"--chip: {fault}; leave it out on one of these, or use --source bundles")
    return chip


def _tune(args: Namespace, chip: str, compiler: Compiler | None) -> int:
    """Search the sizes of one shape, by bundles of `compiler` or, without one, by time, and write the entry.

    The table is opened for writing first, because a search takes minutes.
    """
    import jax

    from ...pallas_kernels.ragged_paged_attention.tpu.backend import TpuBackend
    from ...pallas_kernels.ragged_paged_attention.tpu.sizes import TpuShape, read_tuned, sizes_of
    from ...startup.attention.choice import tuned_path, users_tuned
    from ...startup.user_cache import make_private

    shape = TpuShape(args.num_heads, args.num_kv_heads, args.head_size, args.dtype, args.block_size)
    try:
        table: Path = args.output or tuned_path(TpuBackend)
    except RuntimeError as error:
        raise ConfigError(f"--output: got none, and this user has no table ({error}); name one, or set HOME") from error
    try:
        if args.output:
            table.parent.mkdir(parents=True, exist_ok=True)
        else:
            make_private(table.parent)
        tempfile.TemporaryFile(dir=table.parent).close()
    except OSError as error:
        raise ConfigError(f"--output: {table} cannot be written ({error}); name another table") from error
    try:
        tuned: tuple[TunedEntry, ...] = read_tuned(table) if table.exists() else users_tuned(TpuBackend)
        start = sizes_of(chip, shape, tuned)
        _page_bytes(chip, shape)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    source: Source = Bundles(compiler, shape) if compiler else Measured(chip, shape, args.runs)
    found = search(chip, shape, source, start)
    if found.sizes == start:
        say(f"nothing is better by more than {MIN_GAIN:.0%} than what a start takes now: {start}")
        return 0
    figures = {"unit": source.unit, "before": found.before, "after": found.after}
    entry = {"chip": chip, "shape": shape._asdict()}
    entry |= {"sizes": {**found.sizes._asdict(), "decode": found.sizes.decode._asdict()}, "source": source.name}
    write_entry(table, {**entry, "date": date.today().isoformat(), "jax": jax.__version__, "figures": figures})
    say(f"{found.sizes}: {_cost(found.after, found.before):.3f} of what a start takes now; written to {table}")
    return 0
