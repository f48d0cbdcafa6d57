"""The code that uses torch modules: tracing a model into layers, measuring them, and running a training plan."""
