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
"""Saving, as a share of a kernel's cost, above which other sizes are worth an entry."""
DTYPES = ("bfloat16", "float32")
FACTORS = (0.25, 0.5, 2.0, 4.0)
"""A size is tried at these multiples of its value."""
DECODE_SIZES, PREFILL_SIZES = ("max_rows", "full", "tail", "tile", "buffers"), ("sub_kv", "tile_kv")
FETCHED = ("tile", "buffers", "tile_kv")
"""Sizes that decide how many tokens are fetched together, so that their effect is in memory time only."""
CONTEXT_LENS, PROMPT_LENS = (100, 1000, 8000), (1024, 8192)
DECODES = {100: (64, 16), 1000: (64, 4), 8000: (16, 2)}
"""Context length → rows and layers that are timed if their pages fit into `MAX_BYTES`, as for 8 KV heads of 128."""
MAX_BYTES = 1 << 30
"""Bytes of pages of one workload; each of up to five candidates holds such pages, on chips of 16 GB."""

Figures = dict[str, float]
"""Workload, such as "row of 1000" → cost of a kernel for it, in the unit of its source."""


class Source(Protocol):
    """A way to find out what the kernels cost with given tile sizes."""

    name: str
    unit: str
    sees_copies: bool
    """Whether costs include the time that kernels wait for memory."""

    def figures(self, kind: str, candidates: Sequence[TpuSizes]) -> list[Figures | str]:
        """Return, for each of these sizes, the costs of the kernel `kind`, "decode" or "prefill".

        For sizes that cannot be used it is a string instead, the reason why.
        """


class Bundles:
    """A source of costs in VLIW bundles, counted in the compiler's schedule."""

    name, unit, sees_copies = "bundles", "bundles", False

    def __init__(self, compiler: Compiler, shape: TpuShape):
        self.compiler, self.shape = compiler, shape
        self._figures_of: dict[tuple[str, TpuSizes], Figures | str] = {}
        """Kernel and sizes → figures, for all sizes that were compiled."""
        self.max_spills: int | None = None
        """Registers spilled in decode's innermost loops with the first sizes that were asked for, those of a start."""

    def figures(self, kind: str, candidates: Sequence[TpuSizes]) -> list[Figures | str]:
        """Return the bundles of the kernel `kind` at each of these sizes, as `Source` says; compile each only once."""
        for sizes in candidates:
            if (kind, sizes) not in self._figures_of:
                self._figures_of[kind, sizes] = self._compiled_figures(kind, sizes)
        return [self._figures_of[kind, sizes] for sizes in candidates]

    def _compiled_figures(self, kind: str, sizes: TpuSizes) -> Figures | str:
        """Compile the kernels with these sizes; return the bundles of the kernel `kind`, or why there are none.

        The bundles are of a row of each of CONTEXT_LENS tokens for decode, and of a prompt of each of PROMPT_LENS for
        prefill. Sizes with which decode spills more registers than with the first sizes are refused: a spill costs
        memory accesses that the number of bundles does not show.
        """
        backend = _backend(self.compiler.chip, self.shape, sizes)
        try:
            decode, prefill = self.compiler.attention_loops(backend, self.shape)
            if kind == "decode":
                loops = DecodeLoops.of(decode, self.shape, sizes.decode)
                spills = loops.full.slots[SPILLS] + loops.tail.slots[SPILLS]
                if self.max_spills is None:
                    self.max_spills = spills
                if spills > self.max_spills:
                    return f"spills {spills} registers in its innermost loops"
                return {f"row of {n}": loops.bundles_of_row(n, sizes.decode) for n in CONTEXT_LENS}
            return {
                f"prompt of {n}": bundles_of_prompt(prefill, n, self.shape, sizes, backend.tile_q) for n in PROMPT_LENS
            }
        except Exception as error:  # The compiler has refused the sizes, or the loops have an unknown form.
            return _reason(error)


class Measured:
    """A source of costs in ms per layer, measured on this TPU. Runs of the candidates are interleaved."""

    name, unit, sees_copies = "measured", "ms", True

    def __init__(self, chip: str, shape: TpuShape, num_runs: int):
        self.chip, self.shape, self.num_runs = chip, shape, num_runs

    def backend(self, sizes: TpuSizes) -> TpuBackend:
        """Return the kernels' backend with these sizes on this chip."""
        return _backend(self.chip, self.shape, sizes)

    def workloads(self, kind: str) -> dict[str, Any]:
        """Return the `kernels.Workload`s to time for `kind`, "decode" or "prefill", by name.

        Decode has the rows of DECODES, with one new token each; prefill has one prompt of each of PROMPT_LENS. Rows and
        layers are fewer if their pages would take more than MAX_BYTES.
        """
        from .kernels import Workload

        heads = {name: getattr(self.shape, name) for name in ("num_heads", "num_kv_heads", "head_size")}
        if kind == "decode":
            counts = {n: self._fitting(n, *max_counts) for n, max_counts in DECODES.items()}
            return {f"rows of {n}": Workload(rows, n, layers, **heads) for n, (rows, layers) in counts.items()}
        counts = {n: self._fitting(n, 1, 2) for n in PROMPT_LENS}
        return {f"prompt of {n}": Workload(1, n, layers, query_len=n, **heads) for n, (_, layers) in counts.items()}

    def _fitting(self, context_len: int, num_rows: int, num_layers: int) -> tuple[int, int]:
        """Return rows and layers whose pages take at most MAX_BYTES: halve layers, then rows, but not below 1 each.

        Each row has pages for `context_len` tokens in each layer. Example: if 300 rows of one layer fit, 64 rows and 16
        layers become 64 and 4; if 20 fit, 16 and 1.
        """
        row_bytes = -(-context_len // self.shape.page_size) * _page_bytes(self.chip, self.shape)
        while num_rows * num_layers > max(1, MAX_BYTES // row_bytes):
            num_rows, num_layers = (num_rows, num_layers // 2) if num_layers > 1 else (num_rows // 2, 1)
        return num_rows, num_layers

    def figures(self, kind: str, candidates: Sequence[TpuSizes]) -> list[Figures | str]:
        """Return the median ms per layer of the kernel `kind` at each of these sizes; see `Source`.

        Sizes that cannot be compiled or run alone get their error as a string. If a run fails while the candidates take
        turns, all of them get that error. Otherwise a candidate gets the figures of all workloads, by name.
        """
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
            # A dictionary is the figures of usable sizes, a string the reason why other sizes are not usable.
            try:
                measure(programs, self.num_runs)
            except Exception as error:  # Each program ran alone, so it is not known which one is at fault.
                return [_reason(error)] * len(candidates)
            for index, figures in enumerate(found):
                if isinstance(figures, dict):
                    figures[name] = programs[str(index)].ms
        return found


class Tuned(NamedTuple):
    """The best sizes of a search, and the costs of both kernels with the sizes before it and with the best ones."""

    sizes: TpuSizes
    before: Figures
    after: Figures


def search(chip: str, shape: TpuShape, source: Source, start: TpuSizes) -> Tuned:
    """Search for the tile sizes with the lowest cost on this chip by coordinate descent, and return them.

    Decode's sizes are tuned first, then prefill's: one size after another is set to the best of its value and FACTORS
    times its value, while all others stay. A kernel keeps its sizes of `start` unless the new ones save more than
    MIN_GAIN of its cost. A cost is the geometric mean, over the source's workloads, of the figure divided by that of
    `start`: 0.9 saves 10%. With a source that does not see copies, the sizes of FETCHED stay. Every cost goes to
    stderr. Raises ConfigError if the best sizes so far, at first `start`, have no cost.
    """
    best, before, after = start, Figures(), Figures()
    for kind, names in (("decode", DECODE_SIZES), ("prefill", PREFILL_SIZES)):
        start_figures: Figures | None = None  # Of this kernel, with its sizes of `start`.
        trial_figures: Figures = {}
        trial = best
        for name in names:
            if name in FETCHED and not source.sees_copies:
                continue
            candidates = [trial, *other_sizes(chip, shape, trial, name)]
            costs = dict(zip(candidates, source.figures(kind, candidates), strict=True))
            current = costs[trial]
            if isinstance(current, str):
                raise ConfigError(f"tune: {current}, with sizes that a start would take: {trial}")
            start_figures = start_figures or current
            for sizes, figures in costs.items():
                cost = figures if isinstance(figures, str) else f"{_cost(figures, start_figures):.4f} of the first"
                say(f"{kind}: {name} {_size(sizes, name)}: {cost}")
            usable = {sizes: figures for sizes, figures in costs.items() if isinstance(figures, dict)}
            trial = min(usable, key=lambda sizes: _cost(usable[sizes], current))
            trial_figures = usable[trial]
        assert start_figures is not None
        if _cost(trial_figures, start_figures) >= 1 - MIN_GAIN:
            trial_figures, trial = start_figures, best
        best, before, after = trial, before | start_figures, after | trial_figures
    return Tuned(best, before, after)


def other_sizes(
    chip: str, shape: TpuShape, sizes: TpuSizes, name: str, factors: Sequence[float] = FACTORS
) -> list[TpuSizes]:
    """Return copies of `sizes` in which the size `name` is multiplied by each of `factors`.

    `name` is one of DECODE_SIZES or PREFILL_SIZES, and a product is rounded down. Copies that the kernels cannot work
    with on this chip are left out, so the list may be empty.
    """
    from ...pallas_kernels.ragged_paged_attention.tpu.sizes import check_sizes

    allowed = []
    for factor in factors:
        # Decode's sizes are a tuple of their own within `sizes`.
        change: dict[str, Any] = {name: int(_size(sizes, name) * factor)}
        if name in DECODE_SIZES:
            change = {"decode": sizes.decode._replace(**change)}
        other = sizes._replace(**change)
        with suppress(ValueError):
            check_sizes(chip, shape, other)
            allowed.append(other)
    return allowed


def _size(sizes: TpuSizes, name: str) -> int:
    """Return the value of the size `name`, one of PREFILL_SIZES or DECODE_SIZES."""
    return getattr(sizes if name in PREFILL_SIZES else sizes.decode, name)


def _cost(figures: Figures, reference: Figures) -> float:
    """Return the geometric mean, over the workloads, of the cost in `figures` ÷ that in `reference`: 0.9 saves 10%."""
    return math.exp(sum(math.log(figures[name] / reference[name]) for name in reference) / len(reference))


def _backend(chip: str, shape: TpuShape, sizes: TpuSizes | None = None) -> TpuBackend:
    """Return the kernels' backend for the shape. `sizes` None means the sizes that an engine would choose itself."""
    from ...pallas_kernels.ragged_paged_attention.tpu.backend import TpuBackend

    return replace(TpuBackend.for_heads(chip, shape.num_heads, shape.head_size), sizes=sizes)


def _page_bytes(chip: str, shape: TpuShape) -> int:
    """Return the bytes of a page in one layer; ValueError if the kernels do not take the shape."""
    return page_layout(_backend(chip, shape), shape).page_bytes


def _reason(error: Exception) -> str:
    """Return an error as one line of text, such as "ValueError: no room"."""
    return f"{type(error).__name__}: {one_line(error, 200)}"


def write_entry(table: Path, entry: dict[str, Any]) -> None:
    """Add an entry to a table, a JSON file with a list of entries, in place of any for the same chip and shape.

    A table that does not exist is created; its folder must exist. The file is replaced in one atomic step: it is
    written under another name and then renamed, so that a start never reads half of it.
    """
    entries = json.loads(table.read_text()) if table.exists() else []
    others = [old for old in entries if any(old[key] != entry[key] for key in ("chip", "shape"))]
    temporary = table.with_suffix(".unfinished")
    temporary.write_text(json.dumps([*others, entry], indent=1) + "\n")
    temporary.replace(table)


def main(argv: Sequence[str]) -> int:
    """Run `jpaged tune` with the arguments `argv`; return the exit status 0.

    Progress goes to stderr, and the sizes that were found go to the tuning table. Raises ConfigError if a flag is
    wrong, or if this machine lacks the TPU or the compiler that `--source` needs.
    """
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
        prepare(folder)  # Before anything imports JAX.
        return _tune(args, args.chip, Compiler(args.chip, folder))


def _check(args: Namespace) -> None:
    """Raise ConfigError if a flag's value is not allowed, or if `--source bundles` lacks a `--chip`.

    Query heads must be a multiple of the KV heads, since each KV head serves equally many of them. Whether the kernels
    take the shape is checked later.
    """
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
    """Return the name of this machine's TPU chip, such as "v6e".

    `--chip` need not be given, since the device tells it. Raises ConfigError if JAX's first device is no TPU, a TPU
    that the kernels have no sizes for, or a different chip than `--chip`; the message names what may be done instead.
    """
    import jax

    from ...pallas_kernels.ragged_paged_attention.tpu.backend import TPU_CHIPS

    device = jax.devices()[0]
    if device.platform != "tpu":
        way_out = f"use --source bundles --chip {args.chip or 'v6e'}"
        raise ConfigError(f"--source: got measured, which needs a TPU, this is a {device.platform}; {way_out}")
    chip = TPU_CHIPS.get(device.device_kind)
    if chip is None or args.chip not in (None, chip):
        got = f"{args.chip} and a {device.device_kind}" if args.chip else f"a {device.device_kind} and no chip"
        fault = f"got {got}, the kernels have sizes for {', '.join(TPU_CHIPS)}"
        raise ConfigError(f"--chip: {fault}; leave it out on one of these, or use --source bundles")
    return chip


def _tune(args: Namespace, chip: str, compiler: Compiler | None) -> int:
    """Search the best sizes for the shape of the flags and write them as an entry of the table; return 0.

    Costs are bundles if there is a `compiler`, else times measured on this TPU. The search starts from the sizes that
    an engine would take now; if it finds nothing better, the table does not change. The table is the file `--output`,
    or else that of this user; its folder is made if it is missing. Raises ConfigError if the table cannot be read or
    written, or if the kernels do not take the shape. Whether the table can be written is tried before the search, which
    takes minutes.
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
        _page_bytes(chip, shape)  # Raises ValueError if the kernels do not take the shape.
    except ValueError as error:
        raise ConfigError(str(error)) from error
    source: Source = Bundles(compiler, shape) if compiler else Measured(chip, shape, args.runs)
    best = search(chip, shape, source, start)
    if best.sizes == start:
        say(f"nothing is better by more than {MIN_GAIN:.0%} than what a start takes now: {start}")
        return 0
    figures = {"unit": source.unit, "before": best.before, "after": best.after}
    entry = {"chip": chip, "shape": shape._asdict()}
    entry |= {"sizes": {**best.sizes._asdict(), "decode": best.sizes.decode._asdict()}, "source": source.name}
    write_entry(table, {**entry, "date": date.today().isoformat(), "jax": jax.__version__, "figures": figures})
    say(f"{best.sizes}: {_cost(best.after, best.before):.3f} of what a start takes now; written to {table}")
    return 0
