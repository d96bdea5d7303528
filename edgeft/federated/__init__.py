"""Many devices learn one model: what a device sends, how updates are combined, one round, and Flower around it."""
