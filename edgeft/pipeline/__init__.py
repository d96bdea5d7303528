"""The stages of a run, in order: prepare, search, train, export, eval. Each reads and writes the run folder."""
