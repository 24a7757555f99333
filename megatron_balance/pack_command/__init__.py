"""`megatron-balance pack`: what packing would do for a data set, beside what else there is to do with it."""
