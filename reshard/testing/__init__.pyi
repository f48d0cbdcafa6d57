from .processes import LaunchError as LaunchError, run_processes as run_processes
