"""Sequences that are split over ranks: what is cut, how it is proven, what is exchanged."""
