"""The fields of bodies of /tokenize and /detokenize."""

from __future__ import annotations

from ....text.prompts import CHAT_OPTIONS
from ..fields import BodyField, Use, refused_fields, used_fields

TOKENIZE_FIELDS: dict[str, BodyField] = {
    **used_fields(Use.PROTOCOL, "model", "prompt", "messages", "return_token_strs"),
    **used_fields(Use.PROMPT, "add_special_tokens", *CHAT_OPTIONS, "tools"),
    **refused_fields(mm_processor_kwargs=({},), media_io_kwargs=({},), chat_template=()),
}
DETOKENIZE_FIELDS: dict[str, BodyField] = used_fields(Use.PROTOCOL, "model", "tokens")
