"""Pages, tables and pictures, which read results and need neither an engine nor a run."""
