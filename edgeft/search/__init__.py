"""What to update, found from the rows: contributions, costs, evolution."""
