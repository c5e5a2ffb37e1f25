"""Claims of privacy, audited from below."""
