"""The result of a search: stages, what is predicted of them, and the explanation of both."""
