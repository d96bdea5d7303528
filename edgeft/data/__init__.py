"""Rows of any known format, and the tokens and answer masks made from them."""
