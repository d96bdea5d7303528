"""The embedded handbook: rows that no model can know."""
