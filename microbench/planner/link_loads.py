"""Busy times of the links of each class in a plan: inside hosts, NICs in rails, and uplinks of pods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from microbench.harness.plots import new_figure, save_figure
from reshard.formatting import count_of
from reshard.plan import Plan, tabulate_messages
from reshard.topology import MAX_NICS


@dataclass(frozen=True)
class ClassLoad:
    """The time that links of one class need for their bytes at their rate.

    Attributes:
        num_links: links of the class.
        mean_seconds, busiest_seconds: over the links.
        rail_seconds: the mean over the NICs with each number in their hosts; empty for other links.
    """

    num_links: int
    mean_seconds: float
    busiest_seconds: float
    rail_seconds: tuple[float, ...] = ()

    @classmethod
    def of(cls, seconds: np.ndarray, rail: np.ndarray | None = None) -> ClassLoad:
        """The load of links with these times, and with these rails if they are NICs."""
        rails = () if rail is None else tuple(float(seconds[rail == r].mean()) for r in np.unique(rail))
        return cls(len(seconds), float(seconds.mean()), float(seconds.max()), rails)


def loads_of(plan: Plan) -> dict[str, ClassLoad]:
    """The load of each class of links that a plan uses, from the senders to the receivers.

    All tensors move from one set of ranks to another, as from trainers to servers.
    """
    topology, messages = plan.topology, tabulate_messages(plan)
    host, nbytes = topology.host_array, messages.nbytes
    of_sender, of_receiver = host[messages.sender], host[messages.receiver]
    inside = (of_sender == of_receiver) & (messages.sender != messages.receiver)
    across = of_sender != of_receiver
    sources = np.unique([rank for spec in plan.tensors for rank in spec.src.ranks])
    destinations = np.unique([rank for spec in plan.tensors for rank in spec.dst.ranks])
    loads: dict[str, ClassLoad] = {}

    def add_nics(name: str, ranks: np.ndarray, end: np.ndarray, rates: np.ndarray) -> None:
        nic = host * MAX_NICS + topology.nic_array
        passed = np.bincount(nic[end[across]], nbytes[across], minlength=topology.num_hosts * MAX_NICS)
        rate = np.broadcast_to(rates[: topology.num_hosts], (topology.num_hosts, MAX_NICS)).ravel()
        nics = np.unique(nic[ranks])
        loads[name] = ClassLoad.of(passed[nics] / rate[nics], nics % MAX_NICS)

    out, into = topology.nic_rates
    add_nics("NICs of sources, out", sources, messages.sender, out)
    if topology.pods:
        pod = np.array([topology.host(h).pod for h in range(topology.num_hosts)], dtype=np.int64)
        crosses = across & (pod[of_sender] != pod[of_receiver])
        for name, ranks, end, direction in (
            ("uplinks of their pods, up", sources, of_sender, "egress"),
            ("uplinks of destinations' pods, down", destinations, of_receiver, "ingress"),
        ):
            passed = np.bincount(pod[end[crosses]], nbytes[crosses], minlength=len(topology.pods))
            rate = np.array([getattr(link, f"{direction}_bytes_per_second") for link in topology.pods])
            pods = np.unique(pod[host[ranks]])
            loads[name] = ClassLoad.of((passed / rate)[pods])
    add_nics("NICs of destinations, in", destinations, messages.receiver, into)
    add_nics("NICs of destinations, out", destinations, messages.sender, out)
    if topology.inside_bytes_per_second is not None:
        passed = np.bincount(messages.receiver[inside], nbytes[inside], minlength=len(host))
        loads["links inside hosts, into a rank"] = ClassLoad.of(passed[destinations] / topology.inside_bytes_per_second)
    return loads


def to_json(loads: Mapping[str, ClassLoad]) -> dict[str, Any]:
    """Loads as JSON; :func:`from_json` reads them."""
    return {name: asdict(load) for name, load in loads.items()}


def from_json(record: Mapping[str, Any]) -> dict[str, ClassLoad]:
    """Loads that :func:`to_json` wrote."""
    return {name: ClassLoad(**{**load, "rail_seconds": tuple(load["rail_seconds"])}) for name, load in record.items()}


def draw_loads(
    title: str, loads: Mapping[str, ClassLoad], bound_seconds: float, predicted_seconds: float, path: Path
) -> None:
    """Plot the mean and the busiest link of each class, with the bound and the predicted time.

    Args:
        title: what moves.
        loads: see :func:`loads_of`.
        bound_seconds, predicted_seconds: of the plan.
        path: SVG file to write. Its folder is created.
    """
    figure, ((axes,),) = new_figure(7, 1.1 + 0.36 * len(loads))
    longest = max(predicted_seconds, *(load.busiest_seconds for load in loads.values()))
    for y, load in enumerate(loads.values()):
        axes.barh(y, load.mean_seconds, 0.5, color="C0")
        axes.plot([load.mean_seconds, load.busiest_seconds], [y, y], color="C0", lw=2)
        if load.rail_seconds:
            axes.plot(load.rail_seconds, [y] * len(load.rail_seconds), "o", color="black", ms=2.5)
        words = f"{count_of(load.num_links, 'link')}: mean {load.mean_seconds:.3f}, busiest {load.busiest_seconds:.3f}"
        axes.text(longest * 1.02, y, words, va="center")
    axes.axvline(bound_seconds, color="C2", lw=1.2, ls="--", label=f"lower bound {bound_seconds:.3f} s")
    axes.axvline(predicted_seconds, color="C3", lw=1.2, label=f"predicted {predicted_seconds:.3f} s")
    axes.set_xlim(0, longest * 1.95)
    axes.set_yticks(range(len(loads)), list(loads))
    axes.invert_yaxis()
    axes.set_xlabel("seconds that a link needs for its bytes (bar: mean; line: busiest; dots: rails)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    figure.suptitle(title, fontsize=9)
    save_figure(figure, path)
