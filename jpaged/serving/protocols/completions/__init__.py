"""/v1/completions: texts and token ids that are continued."""
