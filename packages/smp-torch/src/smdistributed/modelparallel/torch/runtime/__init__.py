"""The state of the library in one process, and how it starts and ends."""
