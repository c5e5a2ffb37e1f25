"""What observers see of a run, how accountants bound it, and how much noise that needs."""
