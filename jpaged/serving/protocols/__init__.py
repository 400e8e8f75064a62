"""What clients send and read: bodies become requests of the core, and outputs become answers. No HTTP, no engine."""
