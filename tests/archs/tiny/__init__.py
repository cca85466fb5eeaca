"""A tiny random model for every model file of mlx-lm."""
