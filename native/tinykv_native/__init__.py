"""Attention over paged keys and values on CPUs: a plugin of tinykv-plugin, which finds it by its entry point."""

__version__ = "0.1.0"
