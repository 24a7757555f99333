"""Diagnosis: from the trace of a job's steps to what held it up, how much that costs, and the fix."""
