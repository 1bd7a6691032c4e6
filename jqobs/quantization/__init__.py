"""From a range to a scale and a zero point, and between real values and codes."""
