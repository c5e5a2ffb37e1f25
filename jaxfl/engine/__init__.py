"""Execution of rounds and evaluations: compiled programs, and the memory that they need."""
