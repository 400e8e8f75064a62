"""What the routes know of /v1/completions."""

from ..protocol import GenerationRoute, Protocol
from .encoder import CompletionEncoder
from .parser import parse_completion

COMPLETIONS = Protocol(
    path="/v1/completions", generation_routes={"/v1/completions": GenerationRoute(parse_completion, CompletionEncoder)}
)
