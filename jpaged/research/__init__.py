"""What an engine offers to a trainer in the same process: live weights, sleep, logprobs, arrays."""
