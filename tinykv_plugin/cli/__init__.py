"""The command ``tinykv``. ``cli.main`` is its entry; nothing here imports mlx before a fast BLAS could be loaded."""
