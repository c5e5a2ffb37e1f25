"""A run as its host sees it: what is run, recorded, kept in a folder and told."""
