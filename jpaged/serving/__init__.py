"""The OpenAI-compatible server: HTTP on the outside, messages of requests on the inside."""
