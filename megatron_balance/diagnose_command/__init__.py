"""`megatron-balance diagnose`: what is asked, and the reports of what was found: text, JSON, page, picture, timeline."""
