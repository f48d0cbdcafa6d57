"""Train a model over pipeline stages: cut the model, place and run the stages, and save checkpoints.

``Pipe`` cuts a model into stages and finds what the engine needs to run them. ``PipelineEngine`` trains, evaluates,
saves and resumes. May import everything in ``reshard`` and the rest of ``reshard.scheduler`` except ``training``.
"""
