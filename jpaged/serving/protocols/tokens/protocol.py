"""What the routes know of /tokenize and /detokenize."""

from ..protocol import Protocol
from .parser import detokenize, tokenize

TOKENS = Protocol(path="/tokenize", parser_routes={"/tokenize": tokenize, "/detokenize": detokenize})
