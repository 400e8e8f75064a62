"""/v1/messages: Anthropic's chats."""
