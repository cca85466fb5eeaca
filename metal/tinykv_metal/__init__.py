"""Attention over paged keys and values on Apple GPUs: the backend "metal", a plugin like any other."""
