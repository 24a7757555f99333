"""Packing, the plan: the documents of each global batch, and the bin, rank and place in the step that each gets."""
