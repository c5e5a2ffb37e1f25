"""Comparisons of two mechanisms at the same epsilon."""
