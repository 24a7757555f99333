"""The straggler trace: what each rank of a running job does, recorded without holding it up, and what that says meanwhile."""
