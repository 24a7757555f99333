"""Uniform against balanced: a comparison with real Megatron-LM that runs on any machine with two CPU cores."""
