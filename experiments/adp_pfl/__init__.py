"""ADP-PFL's table and figures, with published and with honest noise."""
