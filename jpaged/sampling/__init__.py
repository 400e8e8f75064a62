"""The parameters of sampling and beam search, and the sampler that turns logits into tokens on the device."""
