"""/v1/responses: OpenAI's Responses, which Codex speaks."""
