"""One run: its folder, its record, its events, and the processes that its stages run in."""
