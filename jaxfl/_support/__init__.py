"""What all rooms use: checks of arguments, files, late imports, and choices for devices."""
