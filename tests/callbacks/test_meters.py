"""Measurements in addition to the metrics: memory and load, tokens and FLOPs per second."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fabricate import Callback, ConfigurationError, DeviceStats, ModelSummary, Throughput, Trainer, TrainModule
from fabricate.callbacks.flop_count import flop_counter
from fabricate.callbacks.throughput import peak_of
from fabricate.testing import run_ranks

FORWARD = 2 * (8 * 16 + 16)
FLOPS_PER_ROW = FORWARD + FORWARD + 2 * 16
"""Forward, the gradients of both weights, and that of the input of the second."""
TOKENS_PER_ROW, PEAK = 5, 1e9


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def training_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x).squeeze(-1), y)
        return {"loss": loss, "weight": TOKENS_PER_ROW * len(x)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Language(TrainModule):
    """With a tp_plan: ranks divide its layers."""

    def configure_model(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **shape))

    def training_step(self, batch: Any) -> torch.Tensor:
        tokens = batch[0].abs().mul(5).long().clamp(max=31)
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def rates(
    plugin: object, strategy: str = "single", module: type[TrainModule] = Net, **arguments: Any
) -> tuple[dict[str, float], float | None]:
    """Of the last log boundary of a fit, and what Throughput counted."""
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64))
    trainer = Trainer(
        max_steps=4,
        log_every=2,
        seed=3,
        gradient_accumulation_steps=2,
        strategy=strategy,
        progress=False,
        print_plan="none",
        plugins=[plugin],
        **arguments,
    )
    trainer.fit(module(), data, batch_size=4)
    return trainer.rates, getattr(plugin, "flops_per_row", None)


def check(measured: dict[str, float], flops_per_row: float | None, ranks: int) -> None:
    assert flops_per_row == FLOPS_PER_ROW
    rows = measured["samples_per_second"]
    assert measured["tokens_per_second"] == pytest.approx(rows * TOKENS_PER_ROW)
    assert measured["flops_per_second"] == pytest.approx(rows * FLOPS_PER_ROW)
    assert measured["mfu"] == pytest.approx(rows * FLOPS_PER_ROW / (PEAK * ranks))


def test_throughput_counts_the_flops_of_a_row_and_stands_beside_the_rates(tmp_path: Path) -> None:
    measured, counted = rates(Throughput(peak=PEAK), run_dir=tmp_path, save_every=None)
    check(measured, counted, 1)
    clock = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["clock"]
    assert clock["mfu"] == measured["mfu"]


def test_throughput_of_a_resumed_fit_counts_its_own_rows(tmp_path: Path) -> None:
    rates(Throughput(peak=PEAK), run_dir=tmp_path)
    again = Throughput(peak=PEAK)
    trainer = Trainer(
        max_steps=6,
        log_every=2,
        progress=False,
        print_plan="none",
        plugins=[again],
        run_dir=tmp_path,
        seed=3,
        gradient_accumulation_steps=2,
    )
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64))
    trainer.fit(Net(), data, batch_size=4)
    check(trainer.rates, again.flops_per_row, 1)


@pytest.mark.parametrize("plugin", [Throughput, ModelSummary])
def test_flops_are_counted_of_a_loss_that_is_scaled_by_a_number(plugin: type[Callback]) -> None:
    class Scaled(Net):
        def training_step(self, batch: Any) -> Any:
            return torch.nn.functional.mse_loss(self.net(batch[0]).squeeze(-1), batch[1]) * 0.5

    counting = plugin()
    rates(counting, module=Scaled)
    counted = counting.flops_per_row if isinstance(counting, Throughput) else counting.micro_batch_flops / 4  # type: ignore[attr-defined]
    assert counted == FLOPS_PER_ROW


class Smooth(Net):
    """With layers whose gradients torch's own counter computes in another way, which rounds differently."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = [
            torch.nn.SiLU(),
            torch.nn.Linear(16, 16),
            torch.nn.Mish(),
            torch.nn.RMSNorm(16),
        ]
        self.net = torch.nn.Sequential(self.net[0], *layers, self.net[2])


@pytest.mark.parametrize("plugins", [[Throughput], [ModelSummary], [ModelSummary, Throughput]])
def test_a_fit_whose_flops_are_counted_has_the_weights_of_one_that_is_not(plugins: list[type[Callback]]) -> None:
    ended = []
    for each in ([], plugins):
        module = Smooth()
        trainer = Trainer(max_steps=3, seed=0, progress=False, print_plan="none", plugins=[plugin() for plugin in each])
        rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        trainer.fit(module, torch.utils.data.TensorDataset(rows, rows.sum(1)), batch_size=16)
        ended.append(torch.nn.utils.parameters_to_vector(module.parameters()))
    assert torch.equal(*ended)


def test_the_counter_leaves_every_operation_whole_that_has_a_kernel_of_its_own() -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    replaced = {name for name in names if has(name, "CompositeImplicitAutograd") and has(name, "CPU")}
    whole = {op.name() for op in flop_counter().flop_registry if isinstance(op, torch._ops.OpOverload)}
    assert replaced == {"aten::silu_backward", "aten::mish_backward", "aten::native_channel_shuffle"}
    assert whole == replaced | {"aten::_fused_rms_norm"}  # which has a kernel on CUDA only


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3"])
def test_throughput_on_two_ranks_is_that_of_both(strategy: str) -> None:
    for measured, counted in run_ranks(rates, 2, Throughput(peak=PEAK), strategy):
        check(measured, counted, 2)


def test_ranks_that_divide_a_layer_count_the_flops_of_the_whole() -> None:
    _, whole = rates(Throughput(), "single", Language)
    assert whole
    assert [counted for _, counted in run_ranks(rates, 2, Throughput(), "fsdp:tp=2", Language)] == [whole, whole]


def test_without_a_known_peak_there_is_no_share_of_it_and_given_flops_count() -> None:
    measured, _ = rates(Throughput(flops_per_row=100.0))
    assert measured["flops_per_second"] == pytest.approx(100 * measured["samples_per_second"])
    assert "mfu" not in measured


def test_device_stats_measure_process_and_machine() -> None:
    measured, _ = rates(DeviceStats())
    resident, memory = psutil.Process().memory_info().rss, psutil.virtual_memory()
    assert measured["process_memory_bytes"] == pytest.approx(resident, rel=0.2)
    assert measured["host_memory_bytes"] == pytest.approx(measured["host_memory_share"] * memory.total)
    assert 0 < measured["process_memory_bytes"] < measured["host_memory_bytes"] < memory.total
    assert 0 <= measured["host_cpu_share"] <= 1
    tick, seconds = 1 / os.sysconf("SC_CLK_TCK"), 2 * measured["seconds_per_step"]  # the kernel counts in ticks
    assert 0 <= measured["process_cpu_cores"] <= psutil.cpu_count() * 1.5 + tick / seconds
    assert not any(name.startswith("device") for name in measured)


def test_each_rank_measures_itself() -> None:
    (first, _), (second, _) = run_ranks(rates, 2, DeviceStats(), "ddp")
    assert first["process_memory_bytes"] != second["process_memory_bytes"]


def test_a_peak_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Throughput\(peak=0\)"):
        Throughput(peak=0)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", None),
        ("NVIDIA L4", 121),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-16GB", 112),
        ("Tesla T4", 65),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_the_peak_of_a_device_is_that_of_exactly_this_one(name: str, teraflops: int | None) -> None:
    assert peak_of(name) == (None if teraflops is None else teraflops * 1e12)
