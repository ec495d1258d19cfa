"""Crash-safe checkpoints: durable files, a store of them, and what all ranks do together."""
