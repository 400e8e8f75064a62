"""/v1/chat/completions: OpenAI's chats."""
