"""Matrix products on one layer of a grid: cuts, dataflows and their prices, collectives."""
