"""Which codes exist, who shares a scale, and both in one description: `QuantSpec`."""
