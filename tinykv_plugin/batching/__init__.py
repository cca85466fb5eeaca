"""Batched generation within the page budget: admission, preemption, and failures that stay with their request."""
