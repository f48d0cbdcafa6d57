"""Train a model over pipeline stages: cut it, place the stages, run them, save them.

``Pipe`` cuts a model into stages and finds what the engine needs to run them. ``PipelineEngine`` trains, evaluates,
saves and resumes. May import everything in ``reshard`` and the rest of ``reshard.scheduler`` except ``training``.
"""
