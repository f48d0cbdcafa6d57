"""The plan as a frozen value, listed or in closed form, its text, its messages and their order, and loads of ports."""
