"""The ``profile-compression`` subcommand of ``reshard``. Torch is imported when it runs."""

from __future__ import annotations

import argparse

HELP = "report what each codec does to the tensors of a run, and recommend a policy"
EXAMPLES = (
    "reshard train gpt3-125m --shrink 8 --meshes 1x1,2x1 --steps 100 --dump-tensors dump",
    "reshard profile-compression dump",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("dump", help="folder that reshard train --dump-tensors has written")


def run(options: argparse.Namespace) -> int:
    """Print the report and the recommended policy."""
    from reshard.cli.progress_bars import show_elapsed
    from reshard.compression.tensor_profile import profile_tensors, read_dump

    with show_elapsed("measuring codecs"):
        profile = profile_tensors(*read_dump(options.dump))
    print(profile)
    policy = profile.recommend()
    if policy.dimensions:
        print(f"recommended: --compression {policy}")
    elif profile.dimensions is not None and not profile.dimensions & {"dp", "pp", "zero"}:
        print("recommended: no codec, because the job has no traffic of dp, pp or zero")
    else:
        print("recommended: no codec")
    return 0
