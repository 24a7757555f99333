"""Conversations for supervised fine-tuning: chat JSONL as tokens, with the assistant's marked. Needs no torch."""
