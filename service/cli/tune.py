"""`tune` and `resume`: run a study from its beginning, or continue one that was interrupted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace
from rich.markup import escape

from steptune.service.cli.commands import (
    COMMAND,
    CommandOrWorkload,
    check_command,
    name_links_out,
    refuse_options,
    refuse_secrets,
    require_workload,
)
from steptune.service.cli.console import (
    INTERRUPTED,
    database_option,
    errors,
    opened_store,
    output,
    print_json,
    say,
    settings_with,
)
from steptune.service.cli.inspect_study import resolve
from steptune.service.cli.live import live_progress
from steptune.service.cli.options import (
    RAY,
    Allow,
    AsJson,
    Budget,
    ClusterAddress,
    Database,
    Device,
    ForeignLoad,
    InsecureRay,
    Isolation,
    NumHosts,
    ObjectiveName,
    Only,
    Python,
    QuietMachine,
    RunnerName,
    SearchName,
    Seed,
    Skip,
    StudyId,
    Workload,
    cluster_of,
    parse_allowed,
    parse_names,
)
from steptune.service.cli.scripts import look_of
from steptune.service.interrupts import interruptible
from steptune.service.quantities import parse_bytes, parse_duration_s
from steptune.service.settings import Settings
from steptune.service.store import SqlStudyStore
from steptune.tuner.errors import ChoiceError, StorageFullError, StoreError, StudyNotFoundError
from steptune.tuner.hardware import check_platform
from steptune.tuner.records import MeasureSettings, Study, StudySettings, StudyState
from steptune.tuner.trials.launch import Launch, num_lone_tasks
from steptune.tuner.workloads.reference import is_command

if TYPE_CHECKING:
    from rich.status import Status

    from steptune.service.isolation import Level
    from steptune.service.on_ray.hosts import Cluster
    from steptune.tuner.protocols import TrialRunner
    from steptune.tuner.records import Recommendation
    from steptune.tuner.scripts.runner import ScriptRunner
    from steptune.tuner.trials.host_group import HostGroup
    from steptune.tuner.trials.runner import LocalRunner

RESULTS = Path("steptune-results")
"""Parent folder of results, for studies without an explicit folder."""

Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Folder for the report and the exports; default steptune-results/STUDY.",
        show_default=False,
    ),
]


class _Tune(CommandOrWorkload):
    """Command that refuses a launcher, such as torchrun, given in place of a workload. Without this refusal, the
    launcher's options would be reported as unknown.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from steptune.service.launched import refuse_launcher

        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception:
            refuse_launcher(given)
            raise


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(cls=_Tune, context_settings={"allow_extra_args": True})(tune)
    app.command()(resume)


def tune(
    context: typer.Context,
    workload: Workload = None,
    budget: Budget = "10m",
    trials: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of trials that the search suggests, including runs of the baseline.",
            show_default=False,
        ),
    ] = None,
    allow: Allow = None,
    only: Only = None,
    skip: Skip = None,
    search: SearchName = "model",
    objective: ObjectiveName = "throughput",
    seed: Seed = 0,
    device: Device = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of processes (ranks) of a trial (default: 1, or as many as launched).",
            show_default=False,
        ),
    ] = None,
    num_hosts: NumHosts = None,
    runner: RunnerName = "local",
    address: ClusterAddress = None,
    insecure_ray: InsecureRay = False,
    remeasure_links: Annotated[
        bool,
        typer.Option(
            "--remeasure-links", help="Measure the links between ranks again, even if an earlier study measured them."
        ),
    ] = False,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="Memory limit per rank, like 8g (default: 90 % of free memory).",
            show_default=False,
        ),
    ] = None,
    phase_timeout: Annotated[
        str | None,
        typer.Option(
            help="Timeout per trial phase, like 90s (default: a multiple of the baseline's).", show_default=False
        ),
    ] = None,
    foreign_load: ForeignLoad = MeasureSettings().foreign_cpu_share,
    quiet_machine: QuietMachine = False,
    verify: Annotated[
        str | None,
        typer.Option(
            help="For a command: then run the script with and without the recommendation in turns, for about this "
            "long, like 2m.",
            show_default=False,
        ),
    ] = None,
    output_folder: Output = None,
    database: Database = None,
    python: Python = None,
    isolation: Isolation = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest configuration of WORKLOAD, or of a command's training script, with the same training;
    --objective selects another goal.

    Write the command after `--`, as you type it: `steptune tune --budget 5m -- python train.py --lr 1e-3`, or torchrun.
    Write Steptune's own options before `--`.
    """
    settings = StudySettings(
        budget_s=parse_duration_s(budget),
        max_trials=trials,
        allow=parse_allowed(allow or []),
        only=parse_names(only),
        skip=parse_names(skip),
        search=search,
        objective=objective,
        seed=seed,
        phase_timeout_s=parse_duration_s(phase_timeout) if phase_timeout else None,
        measure=MeasureSettings(foreign_cpu_share=foreign_load, quiet_machine=quiet_machine),
    )
    command: tuple[str, ...] | None = context.meta.get(COMMAND)
    if command is not None:
        _check_command(context, command, workload)
        way = _way(database, None, None, output_folder, None, as_json=as_json)
        verify_s = parse_duration_s(verify) if verify else None
        with opened_store(way.settings) as store:
            _tune_script(command, settings, store, way, verify_s)
        return
    refuse_options(context, ("verify",), "scripts")
    workload = require_workload(workload, "tune")
    from steptune.service.launched import num_hosts_of, num_ranks_of, refuse_launcher
    from steptune.service.studies import new_study

    refuse_launcher([workload, *context.args])
    if context.args:
        context.fail(f"Got unexpected extra argument{'s' * (len(context.args) > 1)} ({' '.join(context.args)})")
    check_platform()
    launch = _launched(database, isolation)
    hosts = num_hosts_of(launch, num_hosts, reserved=runner == RAY)
    settings = replace(
        settings,
        num_ranks=num_ranks_of(launch, ranks or (hosts if launch is None else None)),
        num_hosts=hosts,
        remeasure_links=remeasure_links,
        device=device,
        memory_limit_bytes=parse_bytes(memory_limit) if memory_limit else None,
    )
    cluster = cluster_of(runner, address, insecure=insecure_ray)
    way = _way(database, isolation, python, output_folder, cluster, as_json=as_json)
    with opened_store(way.settings) as store:
        _run(new_study(workload, settings, way.settings), store, way, launch, is_new=True)


def resume(
    context: typer.Context,
    study_id: StudyId = "last",
    budget: Annotated[
        str | None,
        typer.Option(
            help="Additional time, like 10m; with it, a study that has ended also continues.", show_default=False
        ),
    ] = None,
    runner: RunnerName = "local",
    address: ClusterAddress = None,
    insecure_ray: InsecureRay = False,
    output_folder: Output = None,
    database: Database = None,
    python: Python = None,
    isolation: Isolation = None,
    as_json: AsJson = False,
) -> None:
    """Resume an interrupted or killed study, or give an ended one more time; finished trials are kept."""
    from steptune.service.launched import check_size, num_hosts_of
    from steptune.service.queue import StudyQueue
    from steptune.service.studies import check_unchanged, with_more_time

    check_platform()
    launch = _launched(database, isolation)
    num_hosts_of(launch, None, reserved=runner == RAY)
    cluster = cluster_of(runner, address, insecure=insecure_ray)
    way = _way(database, isolation, python, output_folder, cluster, as_json=as_json)
    with opened_store(way.settings) as store:
        study = resolve(store, study_id)
        if study.state is StudyState.COMPLETED and budget is None:
            option = database_option(database)
            raise StoreError(
                f"study {study.study_id} is complete: print its answer with `steptune show {study.study_id}{option}`, "
                f"or continue its search with `steptune resume {study.study_id}{option} --budget 10m`"
            )
        check_unchanged(study)
        if is_command(study.workload):
            refuse_options(context, ("runner", "address", "insecure_ray", "python", "isolation"))
        check_size(launch, study, reserved=cluster is not None)
        more_s = None if budget is None else parse_duration_s(budget)
        StudyQueue(store.engine).take_over(study.study_id)
        if is_command(study.workload):
            _resume_script(study, store, way, more_s)
            return
        if more_s is not None:
            study = with_more_time(study, store, more_s)
        _run(study, store, way, launch, is_new=False)


@dataclass(frozen=True, kw_only=True)
class _Way:
    """Conditions under which this command runs a new or resumed study: settings, isolation, interpreter, folder,
    cluster.
    """

    settings: Settings
    level: Level
    python: str | None
    folder: Path | None
    cluster: Cluster | None
    as_json: bool
    database: str | None
    """Database as given on the command line."""


def _way(
    database: str | None,
    isolation: str | None,
    python: Path | None,
    folder: Path | None,
    cluster: Cluster | None,
    *,
    as_json: bool,
) -> _Way:
    """Return the conditions under which this command runs a study. Refuse, before anything is stored, a study that
    cannot run here.
    """
    from steptune.service.running import chosen_level
    from steptune.service.studies import check_writable

    settings, interpreter = settings_with(database, isolation), str(python) if python else None
    level = chosen_level(settings, python=interpreter)
    check_writable(folder or RESULTS)
    return _Way(
        settings=settings,
        level=level,
        python=interpreter,
        folder=folder,
        cluster=cluster,
        as_json=as_json,
        database=database,
    )


def _launched(database: str | None, isolation: str | None) -> Launch | None:
    """Return the launch by torchrun or srun if this process drives the study, or None if there is no launcher. Any
    other process of the launch serves the study until the study ends, and then exits.

    Raises:
        typer.Exit: The process has done its part.
    """
    from steptune.service.launched import attend, take_place

    if (num_tasks := num_lone_tasks()) > 1:
        say(
            f"this process runs alone, although srun started {num_tasks} tasks: "
            "set STEPTUNE_HOSTS_SECRET to make them the ranks of one study"
        )
    launch = take_place()
    if launch is None:
        return None
    if launch.drives:
        hosts = "1 host" if launch.num_hosts == 1 else f"{launch.num_hosts} hosts"
        launcher = "torchrun" if launch.local_rank_variable == "LOCAL_RANK" else "srun"
        say(f"launched by {launcher}: {hosts} with {launch.ranks_per_host} ranks each")
        return launch
    attend(launch, settings_with(database, isolation))
    raise typer.Exit


OF_WORKLOADS = (
    *("ranks", "num_hosts", "runner", "address", "insecure_ray", "device", "memory_limit", "python", "isolation"),
    "remeasure_links",
)
"""Options that are refused for a training command, because the command itself determines these settings."""


def _check_command(context: typer.Context, command: Sequence[str], workload: str | None) -> None:
    from steptune.service.launched import refuse_several_hosts

    check_platform()
    check_command(command, workload, "tune")
    refuse_options(context, OF_WORKLOADS)
    refuse_secrets(command)
    refuse_several_hosts(command)
    own = {option for parameter in context.command.params for option in parameter.opts if option.startswith("--")}
    passed = [argument for argument in command if argument.partition("=")[0] in own]
    if passed:
        say(f"the script gets {', '.join(passed)}: write options of `steptune tune` before `--`", style="dim")


def _tune_script(
    command: tuple[str, ...], settings: StudySettings, store: SqlStudyStore, way: _Way, verify_s: float | None
) -> None:
    from steptune.service.cli.verify import verify_answer
    from steptune.service.script_profile import print_recognised
    from steptune.service.script_study import choices_of, new_script_study, print_choices, print_start, why_nothing
    from steptune.service.script_verification import good_results
    from steptune.tuner.scripts.runner import ScriptRunner
    from steptune.tuner.scripts.verification import UNCHANGED

    name_links_out()
    variables = None if verify_s is None else UNCHANGED
    with contextlib.ExitStack() as opened:
        with interruptible():
            look = look_of(command, Path.cwd(), variables, frozen_seed=settings.seed)
            opened.enter_context(contextlib.closing(look))
            study = new_script_study(look, settings, way.settings)
            runner = ScriptRunner(look, Path(study.directory), seed=settings.seed)
            opened.enter_context(contextlib.closing(runner))
            with errors.status("inspecting the machine"):
                choices = choices_of(runner, study)
        if not way.as_json:
            print_recognised(errors, look.record)
            print_choices(errors, choices)
            print_start(errors, look)
        if not choices.tried:
            raise ChoiceError(why_nothing(choices))
        recommendation = _run_script(study, store, way, runner, is_new=True)
        if verify_s is not None:
            target = (way.folder or RESULTS / study.study_id) / "verification.json"
            earlier = good_results(store, study.study_id)
            verify_answer(look, recommendation, settings.measure, earlier, verify_s, target, is_silent=way.as_json)


def _resume_script(study: Study, store: SqlStudyStore, way: _Way, more_s: float | None) -> None:
    from steptune.service.script_study import budget_left_s, check_same_script, script_of
    from steptune.service.studies import with_more_time
    from steptune.tuner.scripts.runner import ScriptRunner

    script = script_of(study)
    seed = study.settings.seed
    with contextlib.ExitStack() as opened:
        with interruptible():
            look = look_of(script.command, Path(script.folder), frozen_seed=seed)
            opened.enter_context(contextlib.closing(look))
        check_same_script(study, look)
        if more_s is not None:
            study = with_more_time(study, store, budget_left_s(more_s, look.seconds))
        runner = opened.enter_context(contextlib.closing(ScriptRunner(look, Path(study.directory), seed=seed)))
        _run_script(study, store, way, runner, is_new=False)


def _run_script(study: Study, store: SqlStudyStore, way: _Way, runner: ScriptRunner, *, is_new: bool) -> Recommendation:
    from steptune.service.deleting import run_by_this_command
    from steptune.service.studies import discarded_unless_recorded

    with discarded_unless_recorded(study, store), run_by_this_command(study), interruptible():
        if is_new:
            store.create_study(study)
        # Trials of a script take no turns with the baseline: an earlier one says nothing of the machine's load now.
        recommendation = _driven(study, store, way, runner, None, measured_anew=not is_new)
    _tell(study, store, way, recommendation)
    return recommendation


def _run(study: Study, store: SqlStudyStore, way: _Way, launch: Launch | None, *, is_new: bool) -> None:
    from steptune.service.deleting import run_by_this_command
    from steptune.service.studies import discarded_unless_recorded, local_runner

    status = errors.status("starting")
    with (
        discarded_unless_recorded(study, store),
        run_by_this_command(study),
        interruptible(),
        _hosts(launch, study, way) as (hosts, check),
        local_runner(
            study,
            way.settings,
            python=way.python,
            level=way.level,
            listener=lambda progress: status.update(escape(progress.text)),
            hosts=hosts,
            check=check,
        ) as runner,
    ):
        begin = (lambda: _begin(study, store, runner, status)) if is_new else (lambda: None)
        recommendation = _driven(study, store, way, runner, hosts, begin)
    _tell(study, store, way, recommendation)


def _driven(
    study: Study,
    store: SqlStudyStore,
    way: _Way,
    runner: TrialRunner,
    hosts: HostGroup | None,
    begin: Callable[[], None] = lambda: None,
    *,
    measured_anew: bool = False,
) -> Recommendation:
    """Run a study to its end, and return its answer.

    Raises:
        typer.Exit: It was interrupted before there was an answer.
    """
    from steptune.service.studies import run_study

    option = database_option(way.database)
    try:
        begin()
        say(f"study {study.study_id}", style="dim")
        with live_progress(errors, quiet=way.as_json) as progress:
            return run_study(
                study,
                store,
                way.settings,
                runner,
                on_change=progress,
                hosts=hosts,
                measured_anew=measured_anew,
            )
    except KeyboardInterrupt:
        if not _is_left_to_resume(study, store):
            say("interrupted before the study began: nothing was recorded")
            raise typer.Exit(INTERRUPTED) from None
        before = "interrupted before the study had an answer"
        if store.recommendation(study.study_id) is not None:
            before = (
                "interrupted before the study had a new answer (print the earlier one with "
                f"`steptune show {study.study_id}{option}`)"
            )
        say(f"{before}: continue with `steptune resume {study.study_id}{option}`")
        raise typer.Exit(INTERRUPTED) from None
    except StorageFullError as error:
        raise StorageFullError(
            f"{error}. Free some space, then continue with `steptune resume {study.study_id}{option}`"
        ) from error


def _tell(study: Study, store: SqlStudyStore, way: _Way, recommendation: Recommendation) -> None:
    """Write the results, and print the answer."""
    from steptune.service.artifacts import open_artifacts
    from steptune.service.studies import write_results
    from steptune.service.trial_source import KeptTrials

    pages = KeptTrials(store, open_artifacts(way.settings))
    results = write_results(study.study_id, pages, recommendation, way.folder or RESULTS / study.study_id)
    if way.as_json:
        print_json(recommendation)
    else:
        from steptune.service.cli.answer import print_answer

        print_answer(output, store, study.study_id, results, database=way.database)


@contextlib.contextmanager
def _hosts(launch: Launch | None, study: Study, way: _Way) -> Iterator[tuple[HostGroup | None, Callable[[], None]]]:
    """Yield all hosts of a study (None if there is only one), and a function that the runner calls to check them."""
    if way.cluster is None:
        from steptune.service.launched import hosts_of

        with hosts_of(launch, study, way.settings, way.level) as hosts:
            yield hosts, lambda: None
        return
    from steptune.service.on_ray.hosts import reserved_hosts

    with reserved_hosts(way.cluster, study, way.settings, way.level, say, timeout_s=way.settings.ray_timeout_s) as (
        hosts,
        check,
    ):
        yield hosts, check


def _is_left_to_resume(study: Study, store: SqlStudyStore) -> bool:
    """Say whether an interrupted study was recorded. If it is still recorded as running, mark it as interrupted."""
    try:
        state = store.get_study(study.study_id).state
    except StudyNotFoundError:
        return False
    if state is StudyState.RUNNING:
        store.set_state(study.study_id, StudyState.INTERRUPTED, "the baseline was not measured")
    return True


def _begin(study: Study, store: SqlStudyStore, runner: LocalRunner, status: Status) -> None:
    """Check that the workload loads on this machine, then record the study."""
    with status:
        runner.check()
    store.create_study(study)
