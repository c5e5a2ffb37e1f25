"""Audits of privacy statements and published claims."""
