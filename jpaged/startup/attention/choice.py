"""Chooses the attention backend, once, at the start: by the device, the model and the option `attention_backend`.

One rule for every backend of the table `BACKENDS`; what differs between them, they say themselves. The backend does not
change later, or silently: what cannot be served as it was asked for is a ConfigError that names the way out.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ...checks import one_line
from ...errors import ConfigError
from ...models.config.spec import ModelSpec
from ...pallas_kernels import ragged_paged_attention
from ...pallas_kernels.ragged_paged_attention.interface import AttentionShape, Backend, BackendUnavailableError
from ...pallas_kernels.ragged_paged_attention.names import BACKENDS, BackendEntry
from ...scheduling.buckets import sample_sizes
from ..user_cache import user_cache

logger = logging.getLogger("jpaged")

ENTRIES = {entry.name: entry for entry in BACKENDS}
FALLBACK = next(entry for entry in BACKENDS if not entry.platforms)
"""Backend that runs on every platform: it serves where the platform's own cannot."""


@dataclass(frozen=True)
class AttentionChoice:
    """A backend, and why it was chosen."""

    backend: Backend
    reason: str
    is_replacement: bool = False
    """Whether a default backend could not serve, for the reason given, and this one serves instead."""
    is_unverified: bool = False
    """Whether the backend's check script has not passed on such a device, as the reason says."""

    def __str__(self) -> str:
        return f"{' · '.join(filter(None, [self.backend.name, self.backend.describe()]))}, {self.reason}"


def attention_shape(model: ModelSpec, kv_dtype: str) -> AttentionShape:
    """Return what a backend has to know of a model: heads, windows, KV data type, and if it has soft caps and sinks.

    Raises ConfigError if layers differ in their number or size of heads, since they share pages.
    """
    heads = {(layer.num_heads, layer.num_kv_heads, layer.head_size) for layer in model.layers}
    if len(heads) > 1:
        shapes = ", ".join(f"{n} query and {k} KV heads of {size}" for n, k, size in sorted(heads))
        wanted = "the same heads in all layers, since they share pages"
        raise ConfigError(f"model: its attention layers have {shapes}, wanted: {wanted}; give another model")
    has_soft_cap = any(layer.soft_cap is not None for layer in model.layers)
    has_sinks = any(layer.has_sinks for layer in model.layers)
    return AttentionShape(*heads.pop(), model.windows, kv_dtype, has_soft_cap, has_sinks)


def choose_attention(
    asked: str, shape: AttentionShape, devices: Sequence[jax.Device], *, deterministic: bool = False
) -> AttentionChoice:
    """Choose the attention backend for these devices, all of one kind. `asked` is the option `attention_backend`.

    With "auto", the first backend in BACKENDS is taken that is a default of the platform and can serve. If there is
    none, FALLBACK is taken. The result's reason says why the last default that was tried cannot serve. Any other value
    of `asked` names a backend. Raises ConfigError if the named backend cannot serve, or if the user's table of tuned
    tile sizes is broken. With `deterministic`, the bits of a sequence's result must not depend on the other sequences
    of its step.
    """
    if asked != "auto":
        backend = backend_by_name(asked, shape, devices, deterministic=deterministic)
        note = _not_verified(ENTRIES[asked], devices[0])
        return AttentionChoice(backend, f"asked for{note}", is_unverified=bool(note))
    reason, is_replacement = f"the default on {devices[0].platform}", False
    for entry in BACKENDS:
        if devices[0].platform not in entry.platforms:
            continue
        if why_not := _why_not_default(entry, devices[0], deterministic=deterministic):
            # A backend that `deterministic` excludes is replaced as the user wished, so there is nothing to warn of.
            reason, is_replacement = f"not {entry.name}: {why_not}", not (deterministic and entry.not_deterministic)
            continue
        try:
            backend_class = load_backend(entry)
            tuned = users_tuned(backend_class)
            backend = backend_class.for_devices(devices, shape, deterministic=deterministic, tuned=tuned)
        except ConfigError:  # A ValueError too, but of a broken table, which no other backend makes good.
            raise
        except ValueError as error:  # The backend cannot be imported, or does not take the shape: try the next one.
            reason, is_replacement = f"not {entry.name}: {error}", True
            continue
        note = _not_verified(entry, devices[0])
        return AttentionChoice(backend, f"{reason}{note}", is_unverified=bool(note))
    fallback = backend_by_name(FALLBACK.name, shape, devices, deterministic=deterministic)
    return AttentionChoice(fallback, reason, is_replacement)


def backend_by_name(
    name: str, shape: AttentionShape, devices: Sequence[jax.Device], *, deterministic: bool = False
) -> Backend:
    """Return the backend `name`, made for models of this shape on these devices, with the user's tuned sizes.

    Raises ConfigError if it does not run on this platform, cannot be imported, or does not take the shape. `name` is a
    name in BACKENDS.
    """
    entry, device = ENTRIES[name], devices[0]
    if not entry.runs_on(device.platform):
        allowed = ", ".join(["auto", *(other.name for other in BACKENDS if other.runs_on(device.platform))])
        where = f"on this device ({device.device_kind})"
        raise ConfigError(f"attention_backend: got {name}, allowed {where}: {allowed}; leave it out")
    try:
        backend_class = load_backend(entry)
        return backend_class.for_devices(devices, shape, deterministic=deterministic, tuned=users_tuned(backend_class))
    except ConfigError:  # Raised as it is, though it is a ValueError too.
        raise
    except BackendUnavailableError as error:
        raise cannot_serve(name, str(error)) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def cannot_serve(name: str, reason: str) -> ConfigError:
    """Return the error for a backend that the user asked for by name and that cannot serve, for this reason."""
    way_out = f"use --attention-backend {FALLBACK.name}"
    return ConfigError(f"attention_backend: got {name}, which cannot serve here: {reason}; {way_out}")


def _why_not_default(entry: BackendEntry, device: jax.Device, *, deterministic: bool) -> str:
    """Return why `auto` does not choose this backend, or "" if it may. Imports no code of the backend."""
    if entry.min_jax and jax.__version_info__ < entry.min_jax:
        return f"it needs jax {'.'.join(map(str, entry.min_jax))} or later, this is {jax.__version__}"
    if deterministic and entry.not_deterministic:
        return f"deterministic is true, and {entry.not_deterministic}"
    return ""


def _not_verified(entry: BackendEntry, device: jax.Device) -> str:
    """Return a note that the backend's check script has not passed on this kind of device; "" if it has or is none."""
    if not entry.check_script or device.device_kind in entry.verified_on:
        return ""
    return f"; not yet verified on {device.device_kind} by {entry.check_script}"


def load_backend(entry: BackendEntry) -> type[Backend]:
    """Import and return the class of a backend. Call it only for a backend that may serve: Pallas takes 0.25 s.

    Raises BackendUnavailableError, which names the package, if a package that the backend needs cannot be imported.
    """
    module, name = entry.class_path.rsplit(".", 1)
    try:
        return getattr(importlib.import_module(f"{ragged_paged_attention.__name__}.{module}"), name)
    except Exception as error:  # A package that is half installed may raise anything.
        package = (getattr(error, "name", None) or "").split(".")[0]
        needs = f"it needs {package}, which" if package not in ("", "jpaged") else "it"
        raise BackendUnavailableError(f"{needs} cannot be imported ({one_line(error)})") from error


def tuned_path(backend: type[Backend]) -> Path:
    """Return the file of the sizes that this user has tuned by `jpaged tune`, for a backend with a `tuned_table`.

    RuntimeError if the user has no home directory.
    """
    assert backend.tuned_table is not None
    return user_cache("tuned") / backend.tuned_table


def users_tuned(backend: type[Backend]) -> tuple[Any, ...]:
    """Return the tile sizes that this user has tuned for a backend by `jpaged tune`; empty if there are none.

    If the table cannot be looked for, a warning is logged and the result is empty. ConfigError if the table is broken.
    """
    if backend.tuned_table is None:
        return ()
    try:
        path = tuned_path(backend)
        if not path.exists():
            return ()
    except (OSError, RuntimeError) as problem:
        logger.warning("this user's table of tile sizes is not looked for: %s", problem)
        return ()
    try:
        return backend.read_tuned(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def block_size_of(
    backend: Backend, shape: AttentionShape, asked: int | None, max_num_seqs: int, max_model_len: int
) -> int:
    """Return the tokens per page: `asked`, or else the backend's default or a larger size.

    Some devices have little room for page tables, and every layer fetches the tables anew. If those of `max_num_seqs`
    sequences of `max_model_len` tokens take more than half of that room with the default size, the smallest larger size
    with which they fit is taken. If they fit with none of these, the default is taken if it fits. Otherwise, and if
    they do not fit with `asked`, ConfigError is raised. Sizes that the backend cannot lay out are passed over. A
    backend without a limit takes `asked` or the default unchecked.
    """
    sizes, limit = [asked or backend.block_sizes[0]], backend.page_table_limit
    if limit is None:
        return sizes[0]
    # The largest steps have room for a few rows more than there are sequences.
    num_rows = sample_sizes(max_num_seqs)[-1]

    def num_entries(block_size: int) -> int:  # int32 entries: each row has its pages, and a few more of the backend.
        return num_rows * (-(-max_model_len // block_size) + limit.row_entries)

    if asked is None and 2 * num_entries(sizes[0]) > limit.max_entries:
        # `block_sizes` is ascending. The default comes last: it is taken only if no larger size serves.
        sizes = [size for size in backend.block_sizes[1:] if _takes_pages(backend, shape, size)] + sizes
    for size in sizes:
        if num_entries(size) <= limit.max_entries:
            return size
    largest = max(sizes)
    raise ConfigError(
        f"max_model_len: got {max_model_len} for {max_num_seqs} sequences and pages of {largest} tokens, "
        f"{num_entries(largest)} numbers of page tables, allowed: {limit.max_entries} with {backend.name}; lower "
        f"max_num_seqs or max_model_len{', raise block_size' if asked else ''}, or use --attention-backend "
        f"{FALLBACK.name}"
    )


def _takes_pages(backend: Backend, shape: AttentionShape, block_size: int) -> bool:
    try:
        backend.layout(shape.kv_shape(block_size))
    except ValueError:
        return False
    return True
