"""/tokenize, /detokenize and /tokenizer_info: the tokenizer alone, without an engine."""
