"""Parts of a body that ask for what only another server runs, such as a search of the web."""

from __future__ import annotations

from ....checks import refusal, shown_name
from ..fields import MAX_WARNED, TakenFields


class LeftOut:
    """The parts of one body that are left out: a warning tells of them, and a strict server refuses the first."""

    def __init__(self, *, is_strict: bool):
        self._is_strict, self._parts = is_strict, list[str]()

    def add(self, path: str, kind: str) -> None:
        """Leave out the part at a path of the body. `kind` says what it is. Raise InvalidRequestError if strict."""
        if self._is_strict:
            way_out = "leave it out, or start the server without --strict"
            raise refusal(path, shown_name(kind), "what this server runs itself", way_out)
        self._parts.append(f"{path} ({shown_name(kind)})")

    def warn(self, fields: TakenFields) -> None:
        """Add the warning to those of the body, if anything was left out."""
        if self._parts:
            more = ", …" if len(self._parts) > MAX_WARNED else ""
            parts = ", ".join(self._parts[:MAX_WARNED])
            fields.warnings.append(f"what this server does not run is left out: {parts}{more}")
