"""Stock Megatron and packing on the same documents, in turns: the quickstart's second round and ``bench/packed_training.py``."""
