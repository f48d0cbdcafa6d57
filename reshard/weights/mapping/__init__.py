"""Which part of which source tensor becomes which part of which destination tensor: rules, and families of models."""
