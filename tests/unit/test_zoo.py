"""Ready workloads, and those made from a transformers config or a timm name."""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from typing import Any

import pytest
import torch
from zoo_references import SMALL, TINY_BERT, TINY_GPT, TINY_VIT

from steptune.tuner.errors import MissingDependencyError, WorkloadNotFoundError, WorkloadRejectedError
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.plan import Plan
from steptune.tuner.workloads.loading import load_workload
from steptune.tuner.workloads.reference import parse_reference
from steptune.tuner.workloads.workload import Workload
from steptune.tuner.workloads.zoo import ZOO, ZooEntry

PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "bert": 109_514_298,
    "bert_large": 335_174_458,
    "vit_large": 304_326_632,
    "vit_huge": 632_045_800,
    "swin_tiny": 28_288_354,
    "swin_base": 87_768_224,
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
}
"""Number of parameters as the models' authors count them (a tied output layer once)."""


def needs(entry: ZooEntry) -> Any:
    absent = [name for name in entry.needs if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(absent), reason=f"needs {', '.join(absent)}")


UNREACHED = ("key.bias", "k_proj.bias", "k.bias")
"""Softmax does not change when all scores of a query do: the bias of keys has no gradient but rounding."""

each_entry = pytest.mark.parametrize("entry", [pytest.param(e, id=e.name, marks=needs(e)) for e in ZOO])
needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


def one_loss(workload: Workload) -> float:
    torch.manual_seed(0)
    job = assemble(workload, Plan(), device=torch.device("cpu"))
    return float(job.step(next(iter(job))))


class TestZoo:
    def test_names_are_unique_and_described(self) -> None:
        assert len({entry.name for entry in ZOO}) == len(ZOO)
        assert all(entry.summary and "\n" not in entry.summary for entry in ZOO)

    def test_an_unknown_name_is_refused_with_the_nearest(self) -> None:
        with pytest.raises(WorkloadNotFoundError, match="no zoo workload 'gtp2': did you mean 'gpt2'"):
            load_workload("zoo:gtp2")

    def test_an_unknown_argument_is_refused(self) -> None:
        with pytest.raises(WorkloadRejectedError, match="colour"):
            load_workload("zoo:synthetic?colour=1")

    @each_entry
    def test_arguments_are_checked_without_importing_anything_and_alike_when_made(self, entry: ZooEntry) -> None:
        wrong = {**parse_reference(SMALL[entry.name]).arguments, "batch": "many"}
        said = f"zoo:{entry.name}: batch is 'many', and must be a whole number"
        for check in (lambda: entry.check(wrong), lambda: entry(**wrong)):
            with pytest.raises(WorkloadRejectedError, match=said):
                check()

    @pytest.mark.parametrize(
        ("reference", "said"),
        [
            ("zoo:timm", r"zoo:timm needs name: write 'zoo:timm\?name=\.\.\.'"),
            ("zoo:timm?nam=resnet18", "zoo:timm needs name, not 'nam'"),
            ("zoo:transformers", "zoo:transformers needs model_type"),
            ("zoo:lstm?batc=3", r"no argument 'batc': did you mean 'batch'\?"),
            ("zoo:synthetic?load_ms=x", "load_ms is 'x', and must be a number"),
            ("zoo:synthetic?batch=true", "batch is True, and must be a whole number"),
            ("zoo:vgg16?image_size=16", "image_size is 16: it must be a multiple of 32"),
        ],
    )
    def test_wrong_arguments_are_named_with_the_way_out(self, reference: str, said: str) -> None:
        with pytest.raises(WorkloadRejectedError, match=said):
            load_workload(reference)

    @each_entry
    def test_builds_without_memory_and_gives_samples(self, entry: ZooEntry) -> None:
        workload = load_workload(SMALL[entry.name])
        with torch.device("meta"):
            model = workload.model()
        assert model.training
        assert len(list(workload.blocks(model))) > 1
        dataset = workload.dataset()
        assert len(dataset) >= workload.global_batch
        assert all(torch.equal(a, b) for a, b in zip(leaves(dataset[1]), leaves(dataset[1]), strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(leaves(dataset[1]), leaves(dataset[2]), strict=True))

    @each_entry
    def test_takes_its_batch_from_the_reference(self, entry: ZooEntry) -> None:
        reference = SMALL[entry.name].replace("batch=2", "batch=3")
        if "batch" not in reference:
            reference += "&batch=3"
        assert load_workload(reference).global_batch == 3

    @needs_transformers
    @pytest.mark.parametrize("name", PARAMETERS)
    def test_sizes_are_those_of_the_published_models(self, name: str) -> None:
        with torch.device("meta"):
            model = load_workload(f"zoo:{name}").model()
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]

    @pytest.mark.parametrize("argument", ["top_k=3", "top_k=0", "experts=none"])
    def test_experts_that_do_not_exist_are_refused(self, argument: str) -> None:
        with pytest.raises(WorkloadRejectedError, match=argument.partition("=")[0]):
            load_workload(f"zoo:mixture_of_experts?{argument}")

    def test_synthetic_trains_with_as_many_workers_as_the_user_has(self) -> None:
        workload = load_workload("zoo:synthetic?load_ms=0&compute_ms=0&length=64&workers=2")
        assert workload.current == {"data_loading": {"num_workers": 2}}
        assert one_loss(workload) > 0


def leaves(sample: Any) -> list[torch.Tensor]:
    return list(sample.values()) if isinstance(sample, dict) else list(sample)


@each_entry
class TestTraining:
    """On one batch in tiny shapes: what holds for every entry."""

    def test_a_batch_is_learnt(self, entry: ZooEntry) -> None:
        """Half of the loss in some dozen updates (detectors have losses that do not vanish: a tenth of it)."""
        workload = load_workload(SMALL[entry.name])
        workload.optimizer = lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2)  # type: ignore[method-assign]
        torch.manual_seed(0)
        job = assemble(workload, Plan(), device=torch.device("cpu"))
        batch = next(iter(job))
        losses = [float(job.step(batch)) for _ in range(60)]
        assert all(math.isfinite(loss) for loss in losses)
        assert losses[-1] < (0.9 if entry.name in ("detector", "monocular_3d") else 0.6) * losses[0]

    def test_gradients_reach_all_parameters(self, entry: ZooEntry) -> None:
        workload = load_workload(SMALL[entry.name])
        torch.manual_seed(0)
        job = assemble(workload, Plan(), device=torch.device("cpu"))
        reached: set[str] = set()
        for _, batch in zip(range(8), job, strict=False):  # an expert or a level may have nothing in one batch
            job.loss(job.to_device(batch)).backward()
            named = dict(job.model.named_parameters())
            reached |= {name for name, p in named.items() if p.grad is not None and p.grad.abs().sum() > 0}
        silent = {name for name, p in job.model.named_parameters() if p.requires_grad} - reached
        assert {name for name in silent if not name.endswith(UNREACHED)} == set()


@needs_transformers
class TestTransformers:
    @pytest.mark.parametrize(
        ("reference", "task", "unit", "num_units"),
        [
            (f"model_type=gpt2&{TINY_GPT}", "causal", "token", 16),
            (f"model_type=bert&{TINY_BERT}", "masked", "token", 16),
            (f"model_type=vit&{TINY_VIT}", "image", "sample", 2),
        ],
    )
    def test_a_config_becomes_a_workload_that_trains(
        self, reference: str, task: str, unit: str, num_units: int
    ) -> None:
        workload: Any = load_workload(f"zoo:transformers?batch=2&sequence=8&lr=0.01&{reference}")
        assert (workload.task, workload.sample_unit, workload.global_batch) == (task, unit, 2)
        job = assemble(workload, Plan(), device=torch.device("cpu"))
        batch = next(iter(job))
        assert workload.num_units(batch) == num_units
        first = float(job.step(batch))
        assert float(job.step(batch)) < first
        assert len(workload.blocks(job.model)) == 2

    def test_padding_is_not_counted(self) -> None:
        workload = load_workload(SMALL["transformers"])
        mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        assert workload.num_units({"input_ids": torch.zeros(2, 3), "attention_mask": mask}) == 3

    def test_an_unknown_model_type_is_named(self) -> None:
        with pytest.raises(WorkloadRejectedError, match="no model type 'gtp2': did you mean 'gpt2'"):
            load_workload("zoo:transformers?model_type=gtp2")

    def test_an_unknown_field_is_refused(self) -> None:
        """Configs keep whatever they are given: a misspelt `batch` would run with eight samples."""
        with pytest.raises(
            WorkloadRejectedError,
            match=r"'bach' is not one of batch, .* nor a field of a gpt2 config: did you mean 'batch'",
        ):
            load_workload("zoo:gpt2?bach=3")

    def test_other_names_of_fields_and_options_of_building_are_fields(self) -> None:
        workload: Any = load_workload("zoo:gpt2?hidden_size=64&num_labels=4&attn_implementation=eager")
        assert (workload.config.n_embd, workload.config._attn_implementation) == (64, "eager")

    @pytest.mark.parametrize("field", ["n_layer=abc", "n_layer=1.5", "summary_type=4,x"])
    def test_a_field_of_another_type_is_named(self, field: str) -> None:
        with pytest.raises(WorkloadRejectedError, match=field.partition("=")[0]):
            load_workload(f"zoo:gpt2?{field}")

    def test_an_unknown_task_is_named_with_those_that_exist(self) -> None:
        with pytest.raises(WorkloadRejectedError, match="task is 'speech': it must be one of causal, masked, image"):
            load_workload("zoo:transformers?model_type=gpt2&task=speech")


@pytest.mark.parametrize(
    ("package", "reference", "command"),
    [
        ("transformers", "zoo:gpt2", r"pip install 'steptune\[transformers\]'"),
        ("timm", "zoo:timm?name=resnet18", r"pip install 'steptune\[timm\]'"),
    ],
)
def test_an_absent_package_is_named_with_what_to_install(
    package: str, reference: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf"needs {package}.*{command}"):
        load_workload(reference)


class _Timm(types.ModuleType):
    """Part of timm that the adapter asks for."""

    @staticmethod
    def list_models() -> list[str]:
        return ["resnet18", "vit_base_patch16_224"]

    @classmethod
    def is_model(cls, name: str) -> bool:
        return name in cls.list_models()

    @staticmethod
    def create_model(name: str, num_classes: int, drop_rate: float = 0.0) -> torch.nn.Module:
        return torch.nn.Linear(1, num_classes)


class TestTimm:
    @pytest.fixture(autouse=True)
    def _stub(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "timm", _Timm("timm"))

    def test_a_mistyped_model_is_named_with_the_nearest(self) -> None:
        with pytest.raises(WorkloadRejectedError, match=r"timm has no model 'resnet1': did you mean 'resnet18'\?"):
            load_workload("zoo:timm?name=resnet1")

    def test_an_option_that_the_model_does_not_have_is_named(self) -> None:
        assert load_workload("zoo:timm?name=resnet18&drop_rate=0.1").model() is not None
        with pytest.raises(WorkloadRejectedError, match=r"rejects its options \(dorp_rate\): .*dorp_rate"):
            load_workload("zoo:timm?name=resnet18&dorp_rate=0.1").model()
