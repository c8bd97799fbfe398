"""The contract that a user implements: what is checked, and what its defaults do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tiny_workloads import Everything, Line, TinyViT
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from steptune.tuner.errors import ChoiceError, WorkloadNotFoundError, WorkloadRejectedError
from steptune.tuner.trials.dataset_look import look_at_dataset
from steptune.tuner.trials.inspection import CheckRequest, InspectRequest, check_workload, inspect_workload
from steptune.tuner.workloads.validation import validate
from steptune.tuner.workloads.workload import Workload, first_length


class Complete(Workload):
    def model(self) -> Any: ...

    def dataset(self) -> Any: ...

    def loss(self, model: Any, batch: Any) -> Any: ...


class TestValidate:
    def test_a_complete_one_is_returned(self) -> None:
        workload = Complete()
        assert validate(workload) is workload

    def test_an_object_of_another_class_is_refused(self) -> None:
        with pytest.raises(WorkloadRejectedError, match=r"str is not a workload: subclass steptune\.Workload"):
            validate("model")

    @pytest.mark.parametrize("missing", ["model", "dataset", "loss"])
    def test_a_missing_method_is_named(self, missing: str) -> None:
        members = {name: getattr(Complete, name) for name in ("model", "dataset", "loss") if name != missing}
        with pytest.raises(WorkloadRejectedError, match=rf"Partial lacks {missing}\(self"):
            validate(type("Partial", (Workload,), members)())

    def test_a_number_is_not_taken_for_a_mistyped_mapping(self) -> None:
        members = {name: getattr(Complete, name) for name in ("model", "dataset", "loss")}
        validate(type("Own", (Workload,), {**members, "learning_rate": 0.1})())

    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("optimiser", "optimizer"), ("global_bacth", "global_batch"), ("max_grad_nrom", "max_grad_norm"),
            ("batch_transforms", "batch_transform"),
        ],
    )  # fmt: skip
    def test_a_mistyped_member_would_be_ignored_and_is_refused(self, name: str, meant: str) -> None:
        members = {known: getattr(Complete, known) for known in ("model", "dataset", "loss") if known != meant}
        with pytest.raises(
            WorkloadRejectedError, match=rf"Own\.{name} is not part of a workload: did you mean {meant}\?"
        ):
            validate(type("Own", (Workload,), {**members, name: getattr(Workload, meant)})())
        instance = type("Own", (Workload,), members)()
        setattr(instance, name, getattr(Workload, meant))
        with pytest.raises(WorkloadRejectedError, match=rf"did you mean {meant}\?"):
            validate(instance)

    def test_a_mistyped_method_that_is_required_is_named(self) -> None:
        members = {"modle": Complete.model, "dataset": Complete.dataset, "loss": Complete.loss}
        with pytest.raises(
            WorkloadRejectedError, match=r"Own lacks model\(self\): did you write modle instead of model\?"
        ):
            validate(type("Own", (Workload,), members)())

    @pytest.mark.parametrize(
        "name",
        ["datasets", "samples", "samplers", "losses", "model_name", "batch", "lr", "_optimiser", "config", "dim"],
    )
    def test_helpers_of_the_users_own_are_left_alone(self, name: str) -> None:
        workload = type("Own", (Complete,), {name: 3})()
        assert validate(workload) is workload

    @pytest.mark.parametrize(
        ("methods", "complete"),
        [(("forward", "criterion"), True), (("training_step",), True), (("forward",), False), (("criterion",), False)],
    )
    def test_a_loss_may_be_two_parts_or_a_step_of_its_own(self, methods: tuple[str, ...], complete: bool) -> None:
        members = {name: getattr(Complete, name) for name in ("model", "dataset")}
        workload = type("Parts", (Workload,), {**members, **{name: lambda self, *_: None for name in methods}})()
        if complete:
            assert validate(workload) is workload
        else:
            with pytest.raises(WorkloadRejectedError, match="define it, or forward and criterion"):
                validate(workload)

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("global_batch", 0, "global_batch is 0: it must be a positive integer"),
            ("global_batch", "32", "global_batch is '32': it must be a positive integer"),
            ("sample_unit", "image", "sample_unit is 'image': it must be 'sample' or 'token'"),
            ("current", ["O1"], r"current is \['O1'\]: it must map strategies to choices"),
        ],
    )
    def test_a_bad_attribute_is_named_with_what_it_must_be(self, name: str, value: Any, message: str) -> None:
        with pytest.raises(WorkloadRejectedError, match=message):
            validate(type("Bad", (Complete,), {name: value})())

    def test_a_loss_of_other_arguments_is_refused(self) -> None:
        class Bad(Complete):
            def loss(self, batch: Any) -> Any: ...  # type: ignore[override]

        with pytest.raises(WorkloadRejectedError, match=r"Bad.loss.* cannot be called as loss\(model, batch\)"):
            validate(Bad())


class TestDefaults:
    def test_forward_and_criterion_make_the_loss(self) -> None:
        class Parts(Line):
            loss = Workload.loss

            def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
                return model(batch[0])

            def criterion(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
                return (output.squeeze(1) - batch[1]).mean()

        x = torch.ones(2, 3)
        assert float(Parts().loss(Parts().model(), [x, torch.ones(2)]).detach()) == 2.0

    def test_units_are_samples(self) -> None:
        assert Line().num_units({"name": "x", "pair": (torch.ones(()), torch.ones(5, 2))}) == 5

    def test_tokens_must_be_counted_by_the_user(self) -> None:
        class Tokens(Line):
            sample_unit = "token"

        with pytest.raises(WorkloadRejectedError, match=r"num_units\(batch\) is missing: return the number of tokens"):
            Tokens().num_units([torch.ones(2)])

    def test_a_batch_without_samples_is_refused(self) -> None:
        with pytest.raises(WorkloadRejectedError, match="implement num_units"):
            first_length({"text": "x", "number": torch.tensor(1)})


class Block(nn.Linear):
    """A member of a repetition."""

    def __init__(self) -> None:
        super().__init__(2, 2)


class TestBlocks:
    def found(self, model: nn.Module) -> list[nn.Module]:
        return list(Workload().blocks(model))

    def test_are_the_longest_list_of_one_class(self) -> None:
        model = nn.ModuleDict({
            "short": nn.ModuleList(Block() for _ in range(2)),
            "long": nn.Sequential(*(Block() for _ in range(3))),
            "mixed": nn.Sequential(Block(), nn.Linear(2, 2), Block(), Block(), Block()),
        })  # fmt: skip
        assert self.found(model) == list(model["long"])

    def test_of_equal_lists_the_outermost_are_taken(self) -> None:
        model = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
        assert self.found(model) == list(model)

    @pytest.mark.parametrize(
        "model",
        [
            nn.Linear(2, 2),
            nn.Sequential(Block()),
            nn.Sequential(nn.ReLU(), nn.ReLU()),
            nn.ModuleList(),
            nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        ],
        ids=["no list", "one member", "no parameters", "empty", "two classes"],
    )
    def test_a_model_without_repetition_has_none(self, model: nn.Module) -> None:
        assert self.found(model) == []

    def test_of_a_transformer(self) -> None:
        model = TinyViT()
        assert self.found(model) == list(model.blocks)

    def test_are_what_the_user_says(self) -> None:
        class Named(Everything):
            def blocks(self, model: Any) -> Any:
                return [model.head]

        model = TinyViT()
        assert list(Named().blocks(model)) == [model.head]


# --- looking at a workload once -------------------------------------------------------------------


class Ignored:
    def send(self, message: Any) -> None:
        pass


def inspect(name: str, directory: Path) -> Any:
    request = InspectRequest(workload=f"test_workload:{name}", study_directory=str(directory))
    return inspect_workload(request, 0, 1, Ignored())  # type: ignore[arg-type]


class Prepared(Line):
    """Reads what `prepare` wrote."""

    def prepare(self, directory: Path) -> None:
        torch.save(super().dataset().tensors, directory / "data.pt")

    def dataset(self) -> Any:
        return TensorDataset(*torch.load(self.directory / "data.pt"))


class TooSmall(Line):
    global_batch = 13


class NotFinite(Line):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * float("nan")


class Detached(Line):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch).detach()


class NotScalar(Line):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])


class FloatLoss(Line):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch).item()


class NoLoss(Line):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        super().loss(model, batch)


class NoModel(Line):
    def model(self) -> Any:
        return None


class UnknownStrategy(Line):
    current: ClassVar[dict[str, Any]] = {"warp_drive": {"on": True}}


class UnknownValue(Line):
    current: ClassVar[dict[str, Any]] = {"precision": {"level": "O9"}}


class UsesO1(Line):
    current: ClassVar[dict[str, Any]] = {"precision": {"level": "O1"}, "data_loading": {"num_workers": 0}}


class Empty(IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


class TestLooking:
    def test_prepare_runs_once_before_the_data_are_read(self, tmp_path: Path) -> None:
        facts = inspect("Prepared", tmp_path)
        assert facts.dataset.length == 12
        assert [path.name for path in tmp_path.rglob("data.pt")] == ["data.pt"]

    def test_current_keeps_what_differs_from_plain_pytorch(self, tmp_path: Path) -> None:
        assert inspect("UsesO1", tmp_path).current == {"precision": {"level": "O1"}}

    @pytest.mark.parametrize(
        ("name", "error", "message"),
        [
            ("TooSmall", WorkloadRejectedError, "has 12 samples, fewer than one batch of 13: give more data"),
            ("NotFinite", WorkloadRejectedError, "the loss of the first batch is nan"),
            ("Detached", WorkloadRejectedError, "does not depend on the model's parameters"),
            ("NotScalar", WorkloadRejectedError, r"a tensor of shape \(4, 1\): reduce it to a scalar"),
            ("FloatLoss", WorkloadRejectedError, r"FloatLoss.loss returned float, not a tensor: .*without \.item\(\)"),
            ("NoLoss", WorkloadRejectedError, r"NoLoss.loss returned NoneType, not a tensor: return the loss"),
            ("NoModel", WorkloadRejectedError, r"model\(\) returned NoneType, not a torch.nn.Module"),
            ("UnknownStrategy", ChoiceError, "no strategy 'warp_drive': choose one of"),
            ("UnknownValue", ChoiceError, "precision has no level 'O9'"),
        ],
    )
    def test_what_cannot_be_trained_is_refused(
        self, name: str, error: type[Exception], message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(error, match=message):
            inspect(name, tmp_path)

    @pytest.mark.parametrize(
        ("dataset", "message"),
        [
            (7, "returned int, which has neither __getitem__ nor __iter__"),
            (Empty(), "the iterable dataset yields no samples"),
            (
                type("Endless", (), {"__getitem__": lambda self, i: i})(),
                "but no __len__: a map-style dataset needs both",
            ),
        ],
        ids=["number", "empty", "no length"],
    )
    def test_what_is_no_dataset_is_refused(self, dataset: Any, message: str) -> None:
        if isinstance(dataset, Empty):
            dataset = iter_only(dataset)
        with pytest.raises(WorkloadRejectedError, match=message):
            look_at_dataset(Line(), dataset, 0)


class TestChecking:
    """Findings of loading, before a study exists."""

    @staticmethod
    def check(name: str, **fields: Any) -> bool:
        request = CheckRequest(workload=f"test_workload:{name}", device="cpu", **fields)
        return check_workload(request, Ignored())  # type: ignore[arg-type]

    def test_a_workload_that_can_be_loaded_passes(self) -> None:
        assert self.check("Line", num_ranks=2)

    @pytest.mark.parametrize(
        ("name", "fields", "message"),
        [
            ("Line", {"num_ranks": 3}, "cannot be split evenly over 3 ranks"),
            ("UnknownStrategy", {}, "no strategy 'warp_drive'"),
            ("Lnie", {}, r"has no class Lnie: did you mean 'Line'"),
        ],
    )
    def test_what_is_wrong_is_named(self, name: str, fields: dict[str, Any], message: str) -> None:
        with pytest.raises((WorkloadRejectedError, WorkloadNotFoundError, ChoiceError), match=message):
            self.check(name, **fields)


class TestTimeOfASample:
    def test_is_that_of_getting_it_and_of_nothing_else(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Seeding the generators takes longer than many a sample, and is done once for all."""
        clock = [0]

        def passing(ns: int, result: Any = None) -> Any:
            clock[0] += ns
            return result

        class Samples:
            def __len__(self) -> int:
                return 64

            def __getitem__(self, index: int) -> Any:
                return passing(1_000, torch.zeros(2))

        monkeypatch.setattr("time.perf_counter_ns", lambda: clock[0])
        monkeypatch.setattr("torch.manual_seed", lambda seed: passing(500_000))
        assert look_at_dataset(Line(), Samples(), 0).sample_ns == 1_000


def iter_only(dataset: Any) -> Any:
    """torch's IterableDataset inherits a `__getitem__`; this has none."""
    return type("IterOnly", (), {"__iter__": lambda self: iter(dataset)})()
