"""This machine: memory, processor, sensors, limits, cache, files and processes. Platform code lives here alone."""
