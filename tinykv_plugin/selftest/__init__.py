"""Backends compared with gather where they run: before they serve, and at length by ``tinykv selftest``."""
