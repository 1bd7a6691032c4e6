"""Whole models: which observer watches what, and what calibrating, simulating and comparing do with it."""
