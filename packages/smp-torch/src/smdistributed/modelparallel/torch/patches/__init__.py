"""Functions that the documented API keeps under ``patches``."""
