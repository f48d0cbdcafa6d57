"""The planner and point-to-point executor of awex (PyPI ``awex``, extra ``[bench]``) as a contender.

awex supports NCCL, HCCL and its own transports. Its planner and its ``batch_isend_irecv`` executor also work unchanged
on CPU tensors over Gloo, so this contender runs awex's real plan with its real executor. Operations and buffers are
created once here; awex itself creates them on every update. Only the modules of the planner and executor are imported,
because the whole package imports inference engines.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

from microbench.peers.base import NotApplicable, Tensors, slices_of
from reshard.sharding import TensorSpec


def _modules() -> tuple[Any, Any, Any, Any]:
    os.environ.setdefault("AWEX_DEVICE_TYPE", "cpu")  # read by awex on import
    if "awex" not in sys.modules:
        spec = importlib.util.find_spec("awex")
        if spec is None or spec.submodule_search_locations is None:
            raise NotApplicable("awex is not installed: pip install 'reshard[bench]'")
        package = types.ModuleType("awex")
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = spec
        sys.modules["awex"] = package
    importlib.import_module("awex.logging").setLevel("WARNING")
    names = ("meta.weight_meta", "sharding.param_sharding", "transfer.nccl_comm", "transfer.transfer_plan")
    modules = [importlib.import_module(f"awex.{name}") for name in names]
    return modules[0], modules[1], modules[2], modules[3]


class Awex:
    """Tensors from source to destination ranks by awex's plan."""

    def __init__(self, specs: Sequence[TensorSpec], rank: int, sources: Tensors, outs: Tensors) -> None:
        senders, receivers = (sorted({r for s in specs for r in getattr(s, side).ranks}) for side in ("src", "dst"))
        if not set(senders).isdisjoint(receivers):
            raise NotApplicable("some ranks send and receive, which awex supports only over CUDA IPC")
        metas, sharding, self._comm, plans = _modules()
        train, infer = [], []
        for number, spec in enumerate(specs):
            dtype, name = getattr(torch, spec.dtype), _name_of(spec, number)
            train.append(_describe(metas, sharding, spec, spec.src, senders, dtype, name))
            infer.append(_describe(metas, sharding, spec, spec.dst, receivers, dtype, name))
        builder = plans.TransferPlanBuilder(infer_world_size=len(receivers), train_world_size=len(senders))
        # awex numbers the receivers first, then the senders
        self._ops: list[Any] = []
        self._packs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._unpacks: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sends = rank in senders
        if not self._sends and rank not in receivers:
            return
        own = len(receivers) + senders.index(rank) if self._sends else receivers.index(rank)
        plan = builder.build_local_transfer_plan(infer, train, own)

        def peer(number: int) -> int:
            return receivers[number] if self._sends else senders[number - len(receivers)]

        plan = plans.TransferPlan(inter_operations={peer(n): ops for n, ops in plan.inter_operations.items()})
        held = sources if self._sends else outs
        tensors = {_name_of(spec, i): tensor for i, (spec, tensor) in enumerate(zip(specs, held, strict=True))}
        with torch.no_grad():
            if self._sends:
                self._ops, _, _ = self._comm.nccl_build_send_ops(tensors, plan, None, -1)
                self._packs = _find_packs(self._ops, plan, tensors)
            else:
                self._ops, self._unpacks, _ = self._comm.nccl_build_recv_ops(tensors, plan, None)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def __call__(self) -> None:
        for view, packed in self._packs:
            packed.copy_(view)
        if self._ops:
            sends, recvs = (self._ops, []) if self._sends else ([], self._ops)
            self._comm.batch_send_recv(sends, recvs, blocking=True, use_group=True)
        for view, received in self._unpacks:
            view.copy_(received)


def _name_of(spec: TensorSpec, number: int) -> str:
    return spec.name if spec.name is not None else f"weight{number}"


def _find_packs(ops: Sequence[Any], plan: Any, tensors: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of tensors that awex copies before it sends them, and the copies. It makes them once, and we each turn."""
    planned = {peer: iter(operations) for peer, operations in plan.operations.items()}
    packs = {}
    for op in ops:
        operation = next(planned[op.peer])
        view = tensors[operation.send_shard_meta.name][operation.train_slices]
        if view.data_ptr() != op.tensor.data_ptr():
            packs[op.tensor.data_ptr()] = (view, op.tensor)
    return list(packs.values())


def _describe(
    metas: Any, sharding: Any, spec: TensorSpec, layout: Any, ranks: list[int], dtype: torch.dtype, name: str
) -> Any:
    """Awex's metadata of one side of a tensor, without ranks that hold nothing of it.

    As in awex, replica k consists of the k-th holder of each region.
    """
    by_box: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    shards = []
    for number, rank in enumerate(ranks):
        box = tuple((cut.start, cut.stop) for cut in slices_of(spec, layout, rank))
        extent = tuple(stop - start for start, stop in box)
        if 0 in extent:
            continue
        split = [dim for dim, size in enumerate(extent) if size != spec.shape[dim]]
        kind = sharding.ShardingType.TP_SHARDING if split else sharding.ShardingType.NO_SHARDING
        shard = metas.ParameterShardMeta(
            tp_rank=number,
            attn_tp_rank=number,
            pp_rank=0,
            ep_rank=0,
            ep_tp_rank=0,
            global_rank=number,
            world_size=len(ranks),
            engine_rank=0,
            name=name,
            shape=extent,
            numel=math.prod(extent),
            dtype=dtype,
            global_offset=tuple(start for start, _ in box),
            sharding_type=kind,
            sharding_dim=split[0] if split else 0,
        )
        shards.append(shard)
        by_box.setdefault(box, []).append(shard)
    for shard in shards:
        shard.num_shards = len(by_box)
    whole = min(map(len, by_box.values()))
    replicas = [
        metas.ParameterReplicaMeta([held[k] for held in by_box.values() if k < len(held)])
        for k in range(whole if layout is spec.src else max(map(len, by_box.values())))
    ]
    return metas.ParameterMeta(
        name=name,
        global_numel=math.prod(spec.shape),
        global_shape=tuple(spec.shape),
        dtype=dtype,
        shards=shards,
        replicas=replicas,
    )
