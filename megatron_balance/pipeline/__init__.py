"""The pipeline split: its search, Megatron's layout string, the plan and how it is shown."""
