"""The report of a run, made from the run folder alone: one HTML file that needs no network, and a model card."""
