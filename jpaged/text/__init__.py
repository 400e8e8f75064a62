"""Text in and out: prompts, tokenizers, chat templates, detokenizing and stop rules."""
