"""Splitting the attention and feed-forward blocks of models that nobody wrote a map for."""
