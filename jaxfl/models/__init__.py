"""Networks as pure functions."""
