"""ADP-PFL: its table and figures, and what an honest budget allows."""
