"""Compatibility: where launch tools look for the exceptions of the library."""
