"""`megatron-balance plan`: a job's flags in, the best layout and what else there was out, without torch or Megatron."""
