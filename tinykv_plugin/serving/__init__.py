"""mlx-lm's HTTP server within the page budget: a bounded queue, failures that stay with their request, metrics."""
