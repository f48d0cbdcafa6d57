"""What a search is given: the layers of a model, their measured times, the devices, and the choices of a stage."""
