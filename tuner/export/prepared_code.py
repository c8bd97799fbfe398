"""Shared code of the Python exports: changes to the model, the dataset and its loader that no target has a setting
for.

An exported module has `prepared(model)`, `prepared_dataset(dataset)` and `prepared_loader(loader)`, which return what
the training loop uses in place of its own; a library that makes the loader itself has `prepared_trainer(trainer)`.
Where they need more than PyTorch, they call Steptune (`in_loops.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from steptune.tuner.export.python_code import literal
from steptune.tuner.export.settings import choice_of
from steptune.tuner.export.translation import Rule, Said, Sections
from steptune.tuner.records import Choice, Recommendation
from steptune.tuner.strategies.attention_backend.choice import AttentionBackendSetting
from steptune.tuner.strategies.compile.choice import CompileSetting
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting
from steptune.tuner.strategies.dataset_cache.choice import DatasetCacheSetting
from steptune.tuner.strategies.memory_format.choice import MemoryFormatSetting

NO_ORDER = "only steptune.apply changes the order of dimensions inside blocks"
_SDP = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn", "math": "math"}
"""Names of attention backends in torch.backends.cuda, used for the CPU too."""


def memory_format(choice: Choice, recommendation: Recommendation) -> Said:
    """Return the code that sets the weights' memory layout; convolutions convert their input to the layout of their
    weight.
    """
    line = "model = model.to(memory_format=torch.channels_last)"
    lines = {"layout": line} if choice["layout"] == "channels_last" else {}
    return Said(sections={"model": lines}, missing={"batch_second": NO_ORDER} if choice["batch_second"] else {})


def dataset_cache(choice: Choice, recommendation: Recommendation) -> Said:
    """Return the code that caches the dataset. If there are workers, a cache in memory is filled beforehand: workers
    share only the entries that were stored before they started.
    """
    if choice["where"] is None:
        return Said()
    workers = int(choice_of(recommendation, DataLoadingSetting.strategy)["num_workers"] or 0)
    filled = ", fill=True" if choice["where"] == "memory" and workers else ""
    line = f"dataset = steptune.cached(dataset, {literal(choice['where'])}{filled})"
    return Said(sections={"dataset": {"where": line}})


def attention_backend(choice: Choice, recommendation: Recommendation) -> Said:
    """Return the code that disables all attention backends but one."""
    if choice["backend"] is None:
        return Said()
    switch = 'getattr(torch.backends.cuda, f"enable_{name}_sdp")'
    names = ", ".join(map(literal, _SDP.values()))
    lines = {"backend": f"for name in ({names}):\n        {switch}(name == {literal(_SDP[str(choice['backend'])])})"}
    if choice_of(recommendation, CompileSetting.strategy)["mode"] is not None:
        tag = literal(f"attention_backend={choice['backend']}")
        lines["cache"] = f"torch.compiler.config.cache_key_tag = {tag}  # compile caches ignore the attention back end"
    return Said(sections={"set_up": lines})


def compile_blocks(choice: Choice) -> Said:
    """Return the code that compiles only the repeated blocks, for targets that compile whole models only."""
    arguments = f"mode={literal(choice['mode'])}, dynamic={literal(choice['dynamic'])}"
    return Said(sections={"model": {"blocks": f"steptune.compile_blocks(model, {arguments})"}})


RULES: Mapping[str, Rule] = {
    MemoryFormatSetting.strategy: memory_format,
    DatasetCacheSetting.strategy: dataset_cache,
    AttentionBackendSetting.strategy: attention_backend,
}


_PREPARED_TRAINER = """

def prepared_trainer(trainer):
    \"\"\"The Trainer that trains, which makes its loader itself.\"\"\"
"""
_AHEAD_IN_TRAINER = """\
    make, known = type(trainer).get_train_dataloader, weakref.ref(trainer)
    trainer.get_train_dataloader = lambda: prepared_loader(make(known()))
"""


def trainer_preparation(sections: Sections) -> str:
    """Return the code of `prepared_trainer`. It refers to the Trainer weakly: a cycle would keep workers alive until
    Python collects it, and their end would then be waited for.
    """
    return f"{_PREPARED_TRAINER}{_AHEAD_IN_TRAINER if sections.get('loader') else ''}    return trainer\n"


def preparations(sections: Sections, returned: str = "model") -> str:
    """Return the code of `prepared`, `prepared_dataset` and `prepared_loader`.

    Args:
        returned: Expression of `model` that `prepared` returns.
    """
    model, dataset, loader = (
        "".join(f"    {line}\n" for line in sections.get(name, {}).values()) for name in ("model", "dataset", "loader")
    )
    return (
        "\n\ndef prepared(model):\n"
        '    """The model to train, before anything wraps it."""\n'
        f"{model}    return {returned}\n"
        "\n\ndef prepared_dataset(dataset):\n"
        '    """The dataset to load from."""\n'
        f"{dataset}    return dataset\n"
        "\n\ndef prepared_loader(loader):\n"
        '    """The loader to iterate, after the library has prepared it."""\n'
        f"{loader}    return loader\n"
    )
