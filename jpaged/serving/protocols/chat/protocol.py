"""What the routes know of /v1/chat/completions."""

from ..protocol import GenerationRoute, Protocol
from .encoder import ChatEncoder
from .parser import parse_chat

CHAT_COMPLETIONS = Protocol(
    path="/v1/chat", generation_routes={"/v1/chat/completions": GenerationRoute(parse_chat, ChatEncoder)}
)
