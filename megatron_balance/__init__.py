"""Megatron Balance: pipeline stages of equal cost for Megatron-LM, without a fork."""

__version__ = "0.1.0.dev0"
