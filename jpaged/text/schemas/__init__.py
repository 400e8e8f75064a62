"""JSON schemas: what they allow, which keywords can be enforced, and their grammars as text."""
