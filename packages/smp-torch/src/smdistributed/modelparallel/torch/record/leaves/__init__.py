"""Modules that stay whole on one partition, run on fakes."""
