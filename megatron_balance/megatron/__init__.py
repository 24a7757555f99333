"""Everything that touches Megatron: one file a hook, and the registry that knows what is applied.

Importing this package imports neither torch nor Megatron; `enable` does.
"""
