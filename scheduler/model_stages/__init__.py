"""Train a torch model over pipeline stages: cut the model, place its stages, and run steps.

``Pipe`` cuts a model into stages and finds what the ``ScheduleEngine`` of :mod:`reshard.scheduler.runtime` needs to run
them. ``PipelineEngine`` is what users hold: it trains, evaluates, saves and resumes, and runs each step by that engine.
May import everything in ``reshard`` and the rest of ``reshard.scheduler`` except ``training``.
"""
