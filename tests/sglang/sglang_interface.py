"""The part of SGLang 0.5.23 that ``reshard.sglang`` uses: the same signatures and answers, and the worst that it allows.

``begin_weight_update`` leaves no old weight as it was, as where packed weights are unpacked in place. A loader that
raises an exception ends its worker, and with it the engine. The value that a loader returns is lost.
"""

from __future__ import annotations

import importlib
import io
import json
import pickle
import sys
import types
from multiprocessing.reduction import ForkingPickler

import torch
import torch.distributed as dist

STATE = "sglang.srt.distributed.parallel_state"


class Engine:
    """The client of workers, which have ranks in a group and share a store with it."""

    def __init__(self, store, size):
        self._store, self._size, self._calls, self._has_ended = store, size, 0, False

    def begin_weight_update(self, selector: str = "all"):
        return self._call("begin", selector)

    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
        payloads = [bytes(ForkingPickler.dumps(named_tensors)).hex() for _ in range(self._size)]
        return self._call("update", payloads, load_format)

    def end_weight_update(self):
        return self._call("end")

    def stop(self):
        self._call("stop")

    def _call(self, *request):
        if self._has_ended:
            raise ConnectionError("the engine has ended")
        self._store.set(f"request/{self._calls}", json.dumps(request))
        answer = self._store.get(f"answer/{self._calls}").decode()
        self._calls += 1
        if answer == "ended":
            self._has_ended = True
            raise ConnectionError("the engine has ended")
        return tuple(json.loads(answer))


class Worker:
    """What the scheduler of one rank does on request."""

    def __init__(self, store, model, group, custom_weight_loaders):
        self._store, self._model, self._group, self._loaders = store, model, group, custom_weight_loaders
        self._rank, self._is_open = dist.get_rank(group), False
        world = types.SimpleNamespace(cpu_group=group)
        for name in ("sglang", "sglang.srt", "sglang.srt.distributed", STATE):
            sys.modules[name] = types.ModuleType(name)
        sys.modules[STATE].get_world_group = lambda: world

    def serve(self):
        """Answer requests until the engine stops, or raise the error that ends it."""
        number = 0
        while True:
            call, *arguments = json.loads(self._store.get(f"request/{number}"))
            if call == "stop":
                return self._answer(number, (True, ""))
            try:
                with torch.inference_mode():
                    answer = getattr(self, f"_{call}")(*arguments)
            except BaseException:
                if self._rank == 0:
                    self._store.set(f"answer/{number}", "ended")
                raise
            self._answer(number, answer)
            number += 1

    def _answer(self, number, answer):
        if self._rank == 0:
            self._store.set(f"answer/{number}", json.dumps(answer))

    def _begin(self, selector):
        if self._is_open:
            return False, "a weight-update session is already open; call end_weight_update() first"
        for parameter in self._model.parameters():
            parameter.data.fill_(float("nan"))
        self._is_open = True
        dist.barrier(self._group)
        return True, "Success"

    def _update(self, payloads, load_format):
        if not self._is_open:
            return (
                False,
                "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()",
            )
        named_tensors = pickle.load(io.BytesIO(bytes.fromhex(payloads[self._rank])))
        if load_format not in self._loaders:
            raise NotImplementedError(f"Unknown load_format={load_format}")
        module, _, function = load_format.rpartition(".")
        getattr(importlib.import_module(module), function)(self._model, named_tensors)
        dist.barrier(self._group)
        return True, "Success"

    def _end(self):
        if not self._is_open:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self._is_open = False
        dist.barrier(self._group)
        return True, "Success"
