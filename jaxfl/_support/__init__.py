"""What all rooms use: checks of arguments, files, imports at the first use, and recipes."""
