"""What an array says about its devices, and placing arguments on them."""
