"""What a layer does that observes or rounds, under Linen and NNX alike."""
