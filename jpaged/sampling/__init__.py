"""What users ask of sampling, and how logits become tokens on the device."""
