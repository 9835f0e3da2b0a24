"""Products of rows with the matrices of their groups."""
