"""Calls while a step is recorded: known ones are answered, new ones are made and written down."""
