"""For people: tables, progress, and the report."""
