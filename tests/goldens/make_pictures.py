"""Draw the picture of the docs: ``python -m tests.goldens.make_pictures``."""

from __future__ import annotations

from pathlib import Path

from reshard.cli.commands.plan_command import default_topology
from reshard.cost import find_bound
from reshard.drawing import draw_image
from reshard.plan import HostBoxes, draw_boxes
from reshard.planner import make_plan
from reshard.sharding import Layout, Mesh

PATH = Path(__file__).parents[2] / "docs" / "images" / "plan.svg"


def picture():
    """The plan of README's benchmark: 2 GiB from two hosts of four ranks to three."""
    src, dst = Layout(Mesh.of("2x4"), "S0 R R"), Layout(Mesh.of("3x4", first_rank=8), "S0 R R")
    topology = default_topology(src.mesh, dst.mesh)
    plan = make_plan(src, dst, (1024, 1024, 512), "float32", topology=topology)
    marked = find_bound(plan).ports
    boxes = HostBoxes.of(plan)
    return draw_image(draw_boxes(boxes, boxes.find_traffic(marked), marked)) + "\n"


if __name__ == "__main__":
    PATH.write_text(picture())
