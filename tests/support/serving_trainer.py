"""A trainer of two ranks for vLLM, each in a process of its own. It does what the test orders over a store."""

from __future__ import annotations

import datetime
import json
import os
import signal

import torch
import torch.distributed as dist

WAIT = datetime.timedelta(minutes=10)
SIZE = 2


def make_model(folder, seed):
    """A model of random weights, the same for the same seed. Its logits differ by far more than rounding."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)
    return model


def check_outputs(folder, seed, prompts, outputs):
    """An engine has the weights of a seed: compare what it generates with the same model in transformers.

    Args:
        outputs: for each prompt: the tokens, and the five largest log-probabilities of each by token.
    """
    model = make_model(folder, seed)
    for prompt, (tokens, logprobs) in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
        expected = logits.log_softmax(-1)
        assert tokens == expected.argmax(-1).tolist()
        for position, largest in zip(expected, logprobs, strict=True):
            values, top = position.topk(5)
            assert set(largest) == set(top.tolist())
            assert max(abs(largest[t] - v) for t, v in zip(top.tolist(), values.tolist(), strict=True)) < 1e-4


class StoreClient:
    """Hands calls of the trainer to the process that has the engine."""

    def __init__(self, store):
        self._store, self._number = store, 0

    def _call(self, name, *args):
        self._store.set(f"call/{self._number}", json.dumps([name, *args]))
        answer = f"answer/{self._number}"
        self._number += 1
        self._store.wait([answer], WAIT)
        if error := self._store.get(answer).decode():
            raise RuntimeError(error)

    def init_weight_transfer_engine(self, init_info):
        self._call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self):
        self._call("start_weight_update")

    def update_weights(self, update_info):
        self._call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version=None):
        self._call("finish_weight_update", weight_version)


def train(rank, port, folder, timeout_seconds):
    """Publish a version for each order."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    from reshard.vllm import TrainerEngine, TrainerInitInfo
    from reshard.weights.routes.route import Route

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("trainer", store.clone()), rank=rank, world_size=SIZE)
    model = make_model(folder, 0)
    fully_shard(model)
    init_info = TrainerInitInfo(
        rank=rank, model=dict(model.named_parameters()), store=store, host="127.0.0.1", timeout_seconds=timeout_seconds
    )
    engine = TrainerEngine.trainer_init(init_info, client=StoreClient(store.clone()))
    number = 0
    while True:
        if rank == 0:
            store.set(f"done/{number}", "")
        store.wait([f"order/{number}"], WAIT)
        order = json.loads(store.get(f"order/{number}"))
        number += 1
        if order is None:
            break
        whole = make_model(folder, order["seed"]).state_dict()
        with torch.no_grad():
            for name, shard in model.state_dict().items():
                shard.copy_(distribute_tensor(whole[name], shard.device_mesh, shard.placements))
        if order.get("dies") and rank == 1:
            Route.start_sending = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        try:
            engine.send_weights()
        except Exception as error:
            print(f"rank {rank} of the trainer: {error}", flush=True)
            if rank == 0:
                store.set(f"failed/{number}", str(error))
    engine.shutdown()
    dist.destroy_process_group()
