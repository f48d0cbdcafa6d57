"""The caches of the tests of model stages: tests of checkpoints train the same models."""

from tests.scheduler.model_stages.conftest import cached  # noqa: F401
