"""A function as a program: what feeds its products, and how it is run with them shown to a visitor."""
