"""Schedules as values: actions, text formats, and where transfers are placed.

May import ``graph`` and ``costs`` of ``reshard.scheduler``, and every package of ``reshard``.
"""

from . import schedule_drawing as schedule_drawing  # registers the drawing of a schedule
