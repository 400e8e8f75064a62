"""Chats: messages in the one form that templates read, and the templates that write them as a prompt."""
