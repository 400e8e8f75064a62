"""What the routes know of Anthropic's protocol."""

from ..protocol import Protocol
from .errors import error_body
from .models import anthropic_model, anthropic_models

MESSAGES = Protocol(
    path="/v1/messages",
    error_body=error_body,
    id_header="request-id",
    version_header=b"anthropic-version",
    model=anthropic_model,
    models=anthropic_models,
)
