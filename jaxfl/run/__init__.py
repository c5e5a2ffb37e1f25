"""A run on its host: what is run, recorded, kept in a folder and shown."""
