"""Arithmetic that no compiler changes, counters past 2**32, and the one door through which arrays come in."""
