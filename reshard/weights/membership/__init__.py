"""Trainers and engines of a name: who is there, their messages in the store, and who is lost."""
