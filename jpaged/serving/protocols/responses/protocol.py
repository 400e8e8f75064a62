"""What the routes know of /v1/responses."""

from ..protocol import GenerationRoute, Protocol
from .encoder import ResponsesEncoder
from .parser import parse_response

RESPONSES = Protocol(
    path="/v1/responses", generation_routes={"/v1/responses": GenerationRoute(parse_response, ResponsesEncoder)}
)
