"""Mechanisms of one kind, beside each other."""
