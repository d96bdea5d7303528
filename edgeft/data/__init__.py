"""Rows of any known format, and the token ids, answer masks and prefix forest made from them; numpy only."""
