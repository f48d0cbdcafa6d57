"""Matrix products on one layer of a grid: dataflows and what they move."""
