"""A failure from a clean seed: reproduced with stock Megatron, diagnosed, mended, and diagnosed again."""
