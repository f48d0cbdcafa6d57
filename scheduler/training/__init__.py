"""Models and the command that trains them over pipeline stages."""
