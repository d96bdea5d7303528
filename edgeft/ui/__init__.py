"""Everything that is drawn in the terminal."""
