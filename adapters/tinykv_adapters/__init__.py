"""Model adapters for mlx-lm's model classes, registered by entry points as a third party's would be."""
