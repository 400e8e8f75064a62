"""What the routes know of Anthropic's protocol."""

from ..protocol import GenerationRoute, Protocol
from .encoder import MessagesEncoder
from .errors import error_body
from .models import anthropic_model, anthropic_models
from .parser import count_tokens, parse_messages

MESSAGES = Protocol(
    path="/v1/messages",
    generation_routes={"/v1/messages": GenerationRoute(parse_messages, MessagesEncoder)},
    parser_routes={"/v1/messages/count_tokens": count_tokens},
    error_body=error_body,
    id_header="request-id",
    version_header=b"anthropic-version",
    model=anthropic_model,
    models=anthropic_models,
)
