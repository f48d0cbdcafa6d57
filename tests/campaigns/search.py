"""Compare the joint strategy search with all plans of random problems: ``python -m tests.campaigns.search --number 500``.

The tests run the first 24 of the same problems. Stops at the first that differs.
"""

from __future__ import annotations

import argparse

from tests.scheduler.autoparallel.test_methods import check_joint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=500, help="number of random problems (default: 500)")
    options = parser.parse_args()
    for seed in range(options.number):
        try:
            check_joint(seed)
        except AssertionError as error:
            raise SystemExit(f"problem {seed} differs: {error}") from error
    print(f"{options.number} problems: the recurrence found the best of all plans in each")


if __name__ == "__main__":
    main()
