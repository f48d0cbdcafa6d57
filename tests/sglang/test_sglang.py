"""The real SGLang takes versions of a trainer, and keeps its own if an update fails."""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing
import socket

import pytest
import torch
import torch.distributed as dist

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]

WAIT = datetime.timedelta(minutes=10)
SIZE = 2
LOADERS = ["reshard.sglang.load_weights"]
FAULTS = "tests.sglang.sglang_faults."
NUM_TOKENS = 16
PROMPTS = [[1 + 7 * i, 3, 200 - 11 * i, 5 * i][: 2 + i % 3] for i in range(8)]
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
}


class _Client:
    """Hands calls of the trainer to the process that has the engine."""

    def __init__(self, store):
        self._store, self._number = store, 0

    def _call(self, name, *args):
        self._store.set(f"call/{self._number}", json.dumps([name, *args]))
        answer = f"answer/{self._number}"
        self._number += 1
        self._store.wait([answer], WAIT)
        return tuple(json.loads(self._store.get(answer)))

    def begin_weight_update(self):
        return self._call("begin_weight_update")

    def update_weights_from_tensor(self, named_tensors, load_format=None):
        return self._call("update_weights_from_tensor", named_tensors[0][0], load_format)

    def end_weight_update(self):
        return self._call("end_weight_update")


def _train(rank, port, folder):
    """Publish a version for each order: a seed of weights."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    from reshard.sglang import Trainer
    from tests.support.serving_trainer import make_model

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=WAIT)
    dist.init_process_group("gloo", store=dist.PrefixStore("trainer", store.clone()), rank=rank, world_size=SIZE)
    model = make_model(folder, 0)
    fully_shard(model)
    engines = [_Client(store.clone())] if rank == 0 else []
    trainer = Trainer(dict(model.named_parameters()), store, engines, host="127.0.0.1", timeout_seconds=60)
    number = 0
    while (seed := json.loads(store.get(f"order/{number}"))) is not None:
        whole = make_model(folder, seed).state_dict()
        with torch.no_grad():
            for name, shard in model.state_dict().items():
                shard.copy_(distribute_tensor(whole[name], shard.device_mesh, shard.placements))
        try:
            trainer.send_weights()
            error = ""
        except Exception as failure:
            error = str(failure)
        if rank == 0:
            store.set(f"done/{number}", error)
        number += 1
    trainer.close()
    dist.destroy_process_group()


class _Run:
    """An engine and a trainer."""

    def __init__(self, folder, tp):
        import transformers

        shape = {**SHAPE, "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"]}
        transformers.LlamaConfig(**shape).save_pretrained(folder)
        self._folder, self._orders, self._calls = folder, 0, 0
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        fork = multiprocessing.get_context("fork")
        self._trainer = [fork.Process(target=_train, args=(rank, port, folder), daemon=True) for rank in range(SIZE)]
        for process in self._trainer:
            process.start()
        self._store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)

        from sglang import Engine

        self.engine = Engine(
            model_path=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cpu",
            dtype="float32",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            tp_size=tp,
            max_total_tokens=2048,
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            custom_weight_loader=[*LOADERS, FAULTS + "fail_to_load", FAULTS + "flip_a_bit"],
        )

    def order(self, seed):
        """Let the trainer publish a version, and do what it asks of the engine; returns its error."""
        self._store.set(f"order/{self._orders}", json.dumps(seed))
        done = f"done/{self._orders}"
        self._orders += 1
        while not self._store.check([done]):
            assert self._trainer[0].is_alive()
            if not self._store.check([f"call/{self._calls}"]):
                self._trainer[0].join(0.02)
                continue
            name, *args = json.loads(self._store.get(f"call/{self._calls}"))
            if args:
                args = ([(args[0], torch.empty(0))], args[1])
            self._store.set(f"answer/{self._calls}", json.dumps(getattr(self.engine, name)(*args)))
            self._calls += 1
        return self._store.get(done).decode()

    def plant(self, fault):
        assert self.engine.begin_weight_update()[0]
        assert self.engine.update_weights_from_tensor([("", torch.empty(0))], load_format=FAULTS + fault)[0]
        assert self.engine.end_weight_update()[0]

    def generate(self):
        """For each prompt: the tokens, and the largest log-probabilities of each by token."""
        outputs = self.engine.generate(
            input_ids=PROMPTS,
            sampling_params={"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True},
            return_logprob=True,
            top_logprobs_num=5,
        )
        return [
            (
                output["output_ids"],
                [{token: value for value, token, _ in top} for top in output["meta_info"]["output_top_logprobs"]],
            )
            for output in outputs
        ]

    def check(self, seed):
        """The engine has the weights of a seed."""
        from tests.support.serving_trainer import check_outputs

        check_outputs(self._folder, seed, PROMPTS, self.generate())

    def close(self):
        self._store.set(f"order/{self._orders}", "null")
        for process in self._trainer:
            process.join(60)
            process.kill()
        self.engine.shutdown()


@pytest.mark.parametrize("tp", [1, 2])
def test_versions_are_whole_or_absent(tp, tmp_path, monkeypatch):
    pytest.importorskip("sglang", reason="SGLang needs a separate environment: see docs/sglang.md")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, range(tp))))  # the cores of each worker
    with contextlib.closing(_Run(tmp_path, tp)) as run:
        for seed in (1, 2):
            assert run.order(seed) == ""
            run.check(seed)
        held = run.generate()

        run.plant("fail_to_load")
        assert f"rank {tp - 1}: ValueError: planted" in run.order(3)
        assert run.generate() == held

        run.plant("flip_a_bit")
        assert f"'model.norm.weight' [0:64] on rank {tp - 1}: the digest" in run.order(4)
        assert run.generate() == held

        assert run.order(5) == ""
        run.check(5)
