"""Sharded data parallelism: parameters in shards, which are gathered while they are used."""
