"""The workloads of the table of several GPUs, and what an expert sets for them by hand."""

from __future__ import annotations

from dataclasses import dataclass

from by_hand_rows import SMALL_RESNET, SMALL_VIT, Choices, of_every_column
from stamp import ROOT

WORKLOAD = f"{ROOT}/benchmarks/workloads/mixed_precision.py:mixed_precision"
DDP = "DDP 25 MiB"
O1: Choices = {"precision": {"level": "O1", "dtype": "bfloat16"}}
O2: Choices = {"precision": {"level": "O2", "dtype": "bfloat16"}}
COMPILED: Choices = {"compile": {"mode": "default", "scope": "whole", "dynamic": False}}
COMPILED_BLOCKS: Choices = {"compile": {"mode": "default", "scope": "regional", "dynamic": False}}
SOCKETS: Choices = {"nccl_settings": {"socket_threads": 4, "sockets_per_thread": 4}}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One workload.

    Attributes:
        workload: An entry of the zoo, without its batch.
        per_gpu: Samples of a step on one GPU; None for the most that DDP at O1 fits.
        small: The workload of a dry run, without its batch.
        image: Its samples are images.
        convolves: It has convolutions, for which cuDNN's benchmark is on.
        blocks: It repeats blocks, which are compiled each by itself.
    """

    name: str
    workload: str
    per_gpu: int | None
    small: str
    image: bool = True
    convolves: bool = True
    blocks: bool = True

    def reference(self, batch: int, *, small: bool) -> str:
        entry = self.small if small else self.workload
        return f"{WORKLOAD}?entry={entry.replace('?', '&')}&batch={batch}"


_GPT = "sequence=32&n_layer=2&n_embd=32&n_head=2&vocab_size=256&n_positions=32&bos_token_id=0&eos_token_id=0"
_BERT = "sequence=32&hidden_size=32&num_hidden_layers=2&num_attention_heads=2&intermediate_size=64&vocab_size=256"
_VGG = "image_size=32&divisor=8&hidden=64&num_labels=10"
ROWS: tuple[Row, ...] = (
    Row(name="vit_large", workload="vit_large", per_gpu=64, small=f"vit_large?{SMALL_VIT}&patch_size=8"),
    Row(name="vit_huge", workload="vit_huge", per_gpu=32, small=f"vit_huge?{SMALL_VIT}&patch_size=8"),
    Row(name="vit_huge_largest", workload="vit_huge", per_gpu=None, small=f"vit_huge?{SMALL_VIT}&patch_size=8"),
    Row(
        name="gpt2_large",
        workload="gpt2_large?sequence=1024",
        per_gpu=4,
        small=f"gpt2_large?{_GPT}",
        image=False,
        convolves=False,
    ),
    Row(name="resnet50", workload="resnet50", per_gpu=64, small=f"resnet50?{SMALL_RESNET}", blocks=False),
    Row(name="vgg16", workload="vgg16", per_gpu=64, small=f"vgg16?{_VGG}", blocks=False),
    Row(
        name="bert_large",
        workload="bert_large?sequence=512",
        per_gpu=16,
        small=f"bert_large?{_BERT}",
        image=False,
        convolves=False,
    ),
)


def by_hand(row: Row, *, network: str, lossy: bool, on_cpu: bool) -> dict[str, Choices]:
    """The columns of the table, the default first and then the most promising: compiled ones before those that are not.

    A model that repeats blocks is compiled block by block, as FSDP2's documentation does it.
    """
    common = of_every_column(convolves=row.convolves, on_cpu=on_cpu)
    compiled = COMPILED_BLOCKS if row.blocks else COMPILED

    def sharded(mode: str, **more: bool | str) -> Choices:
        return {**O2, "sharding": {"mode": mode, "wrap": "block", "ignored": "norms", **more}}

    bf16: Choices = {"gradient_compression": {"method": "bf16"}}
    hierarchical: Choices = {"hierarchical_allreduce": {"levels": 2}}
    columns: dict[str, Choices] = {DDP: O1, "DDP, compiled": {**O1, **compiled}}
    if network != "one":
        hybrid = sharded("hybrid", reshard=False)
        columns |= {
            "hybrid sharding, 4 x 4 sockets, compiled": {**hybrid, **SOCKETS, **compiled},
            "DDP, 4 x 4 sockets, compiled": {**O1, **SOCKETS, **compiled},
            "hierarchical": {**O1, **hierarchical},
            "hybrid sharding": hybrid,
            "DDP, 4 x 4 sockets": {**O1, **SOCKETS},
            "hybrid sharding, 4 x 4 sockets": {**hybrid, **SOCKETS},
        }
        if lossy:
            columns |= {
                "hybrid sharding, bf16 reduction": {**hybrid, **bf16},
                "hierarchical, bf16 between hosts": {**O1, **hierarchical, **bf16},
            }
    if lossy:
        columns |= {
            "DDP, bf16 hook, compiled": {**O1, **bf16, **compiled},
            "PowerSGD 4": {**O1, "gradient_compression": {"method": "powersgd", "rank": 4}},
            "DDP, bf16 hook": {**O1, **bf16},
        }
    columns |= {
        "FSDP2 per block, compiled": {**sharded("full"), **compiled},
        "FSDP2 per block, grad_op, compiled": {**sharded("grad_op"), **compiled},
        "FSDP2 per block": sharded("full"),
        "FSDP2 per block, grad_op": sharded("grad_op"),
        "DDP 200 MiB": {**O1, "ddp_buckets": {"bucket_cap_mb": 200}},
    }
    return {name: {**common, **choices} for name, choices in columns.items()}
