"""The fields of bodies of /v1/completions."""

from __future__ import annotations

from ..fields import COMMON_FIELDS, BodyField, Use, refused_fields, used_fields

COMPLETION_FIELDS: dict[str, BodyField] = {
    **COMMON_FIELDS,
    **used_fields(Use.PROTOCOL, "prompt", "echo"),
    **refused_fields(suffix=("",)),
}
