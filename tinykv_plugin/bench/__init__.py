"""The benchmarks: stock mlx-lm and paged caches side by side, in one process, with the answers compared."""
