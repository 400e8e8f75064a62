"""Text to token ids and back: tokenizers as checkpoints and vocabulary files hold them, and streams of ids as text."""
