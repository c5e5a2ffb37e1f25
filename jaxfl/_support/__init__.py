"""What all rooms use: checks of arguments, files, late imports, recipes, choices for devices."""
