"""Communication of objects: transports that move bytes, and the calls that stand on them."""
