from .processes import LaunchError as LaunchError, run_processes as run_processes
from .sharing import share_gpus as share_gpus
