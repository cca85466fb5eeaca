"""The demonstration: a small model from the package index, converted once, to try paged caches on."""
