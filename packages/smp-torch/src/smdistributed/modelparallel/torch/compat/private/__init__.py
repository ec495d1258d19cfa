"""Everything that is used of PyTorch beyond its public API, in one place.

``self_test`` uses each of them once and names what an installed PyTorch does otherwise; the unit
tests run it for each version that the package claims. No other module of the package names what
PyTorch marks as its own by a leading underscore.
"""
