"""The table of Megatron versions: what trains with our flags, and with which losses."""
