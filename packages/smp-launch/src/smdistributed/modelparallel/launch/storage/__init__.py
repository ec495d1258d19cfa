"""Files behind addresses: folders of this machine and object stores, by fsspec."""
