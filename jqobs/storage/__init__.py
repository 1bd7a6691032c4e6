"""States in files, and state dictionaries of other frameworks."""
