"""Runs Metal kernels on a CPU: the text that mlx generates, through a shim that makes C++ of it, checked as it runs."""
