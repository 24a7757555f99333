"""Megatron's pipeline schedules: the order of operations, and how long a step takes."""
