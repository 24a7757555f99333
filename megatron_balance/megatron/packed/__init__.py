"""`--varlen-packing`: Megatron trains on bins of whole documents instead of text chopped at every sequence length."""
