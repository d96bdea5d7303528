"""What is updated: schemes and the layers that carry them."""
