"""Methods that every user looks for: what their papers found, on a small task."""
