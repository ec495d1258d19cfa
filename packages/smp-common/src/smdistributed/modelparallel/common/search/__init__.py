"""Searching for the configuration of a job: degrees, schedule and microbatches that fit."""
