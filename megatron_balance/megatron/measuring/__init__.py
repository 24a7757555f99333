"""Measuring what the job's own modules cost: a process of its own runs the job's script on a model of few layers."""
