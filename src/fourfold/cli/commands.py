"""The command tree. Each command calls one function of a room below, which is imported when the command runs."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import App, Parameter

from fourfold.cli.outcome import printing, show

Json = Annotated[bool, Parameter(name="--json", negative="")]
Overrides = Annotated[str, Parameter(name="key.path=value")]


def _version() -> str:
    from importlib.metadata import version

    return f"fourfold {version('fourfold')}"


app = App(
    name="fourfold",
    help="Train networks on many devices: a plan of four choices, forecast, run, and shown to equal the serial run.",
    help_epilogue="Settings follow the config as key.path=value, without dashes: train.steps=10 optimizer.lr=3e-4",
    version=_version,
    help_format="plaintext",
    exit_on_error=False,
    print_error=False,
    help_on_error=False,
    suppress_keyboard_interrupt=False,
    result_action="return_value",
)
settings = App(name="config", help="Look at settings: the resolved config, the schema, one setting explained.")
app.command(settings)
schedules = App(name="schedule", help="Look at pipeline schedules: what there is, drawn, two side by side.")
app.command(schedules)


@app.command
def train(
    config: str, /, *overrides: Overrides, resume: Annotated[bool, Parameter(negative="")] = False, json: Json = False
) -> int:
    """Train a model by a config, and write a run folder with its report.

    Parameters
    ----------
    config
        A YAML or TOML file; see examples/.
    overrides
        Settings laid over the file, each value as in TOML: train.steps=10.
    resume
        Go on from the newest whole checkpoint (the same as run.resume=true).
    json
        Print the result as JSON on stdout, and everything else on stderr.
    """
    from fourfold.cli.settings import blaming, load, speaks

    loaded = load(config, [*overrides, *(["run.resume=true"] if resume else [])])
    with printing(json), blaming(loaded):
        from fourfold.cli.trained import Trained, again
        from fourfold.training.launch import train as run

        outcome = run(loaded)
        if not speaks():
            return 0 if outcome.ok else 1
        result = Trained.of(outcome, again(config, overrides, outcome.folder.name))
    return show(result, json)


@app.command
def verify(
    config: str,
    /,
    *overrides: Overrides,
    steps: int = 3,
    backend: Literal["threads", "gloo"] = "threads",
    json: Json = False,
) -> int:
    """Run the config's plan beside one plain process and compare losses, gradients, weights and bytes.

    Exit code 1: the plan is exact, and its numbers differ from the serial ones.

    Parameters
    ----------
    config
        A YAML or TOML file (see examples/), or a run's folder: then its config is verified, and its report shows it.
    overrides
        Settings laid over a file, each value as in TOML: plan.placement.data=2.
    steps
        Optimizer steps to compare.
    backend
        Ranks as threads of this process, or as processes that talk by gloo.
    json
        Print the result as JSON on stdout, and everything else on stderr.
    """
    from fourfold.cli.settings import blaming, load_run_or_config, positive

    positive("--steps", steps)
    loaded, folder = load_run_or_config(config, overrides)
    with printing(json), blaming(loaded):
        from fourfold.verify import verify as compare

        result = compare(loaded, steps=steps, backend=backend)
        if folder is not None:
            from fourfold.cli.verified import keep

            keep(folder, result)
    return show(result, json)


@app.command
def plan(
    config: str,
    /,
    *overrides: Overrides,
    schedules: Annotated[bool, Parameter(negative="")] = False,
    json: Json = False,
) -> int:
    """Forecast the config's plan, or rank the plans that fit the hardware and say what bound the rejected ones.

    Parameters
    ----------
    config
        A YAML or TOML file; see examples/.
    overrides
        Settings laid over the file, each value as in TOML: 'hardware="8x rtx4090"'.
    schedules
        Instead, lay every pipeline schedule over the model, and say which is fastest and what the others lose by.
    json
        Print the result as JSON on stdout, and everything else on stderr.
    """
    from fourfold.cli.settings import blaming, load

    loaded = load(config, overrides)
    with printing(json), blaming(loaded):
        from fourfold.cli.outlook import compared, outlook

        result = compared(loaded.config) if schedules else outlook(loaded.config)
    return show(result, json)


@app.command
def doctor(*, json: Json = False) -> int:
    """Look at this machine: versions, devices, a real collective with its bandwidth; what is wrong and what to do.

    Parameters
    ----------
    json
        Print the result as JSON on stdout, and everything else on stderr.
    """
    with printing(json):
        from fourfold.verify.doctor import doctor as examine

        result = examine()
    return show(result, json)


@app.command
def report(run: str, /, *, json: Json = False) -> int:
    """Write a run's report again: one HTML page and a trace.

    Parameters
    ----------
    run
        The run's folder.
    json
        Print the result as JSON on stdout, and everything else on stderr.
    """
    from fourfold.cli.settings import run_folder

    folder = run_folder(run)
    with printing(json):
        from fourfold.report import write

        result = write(folder)
    return show(result, json)


@app.command
def export(
    run: str,
    folder: str,
    /,
    *,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    axonn: Annotated[tuple[int, int, int] | None, Parameter(negative="")] = None,
    json: Json = False,
) -> int:
    """Write a run's newest checkpoint as Hugging Face safetensors, which transformers loads, or as per-rank files.

    Parameters
    ----------
    run
        The run's folder.
    folder
        Where to write.
    overwrite
        Replace what an earlier export wrote there (of Hugging Face files only).
    axonn
        ROW COL DEPTH: instead, one safetensors file a rank of this grid, laid out as AxoNN's checkpoints are.
    json
        Print the result as JSON on stdout, and everything else on stderr.
    """
    from fourfold.cli.settings import run_folder, without

    if axonn is not None:
        without("--overwrite", overwrite, "with --axonn: name an empty folder or none")
    source = run_folder(run)
    with printing(json):
        if axonn is not None:
            from fourfold.training.axonn_export import AxonnGrid
            from fourfold.training.axonn_export import export as write_ranks

            result = write_ranks(source, folder, AxonnGrid(*axonn))
        else:
            from fourfold.training.export import export as write

            result = write(source, folder, overwrite=overwrite)
    return show(result, json)


@app.command
def reproduce(
    *names: str, list: Annotated[bool, Parameter(name="--list", negative="")] = False, json: Json = False
) -> int:
    """Run the claims of published systems: paper, claim, predicted, measured, control, verdict.

    Exit code 0 only if every claim holds.

    Parameters
    ----------
    names
        Recipes to run; none: all.
    list
        Only name the recipes.
    json
        Print the result as JSON on stdout, and everything else on stderr.
    """
    from fourfold import recipes
    from fourfold.cli.outcome import Listing
    from fourfold.cli.settings import among

    known = tuple(recipes.names())
    if list:
        return show(Listing("recipes", known), json)
    among("recipe", names, known)
    with printing(json):
        result = recipes.reproduce(names or known)
    return show(result, json)


@settings.command(name="show")
def show_config(*arguments: Annotated[str, Parameter(name="CONFIG key.path=value")], json: Json = False) -> int:
    """Print the whole config as a run would use it, defaults included; the output is a config file itself.

    Parameters
    ----------
    arguments
        A YAML or TOML file (none: the defaults), and settings laid over it.
    json
        Print it as JSON.
    """
    from fourfold.cli.settings import Resolved, load_any

    return show(Resolved(load_any(arguments).config), json)


@settings.command
def schema(*, json: Json = False) -> int:
    """Print the JSON schema of a config, for editors.

    Parameters
    ----------
    json
        The schema is JSON either way.
    """
    from fourfold.cli.settings import Schema

    return show(Schema(), json)


@settings.command
def explain(
    key: str, /, *arguments: Annotated[str, Parameter(name="CONFIG key.path=value")], json: Json = False
) -> int:
    """Explain one setting: what it means, what it holds, its default, and its value in a config.

    Parameters
    ----------
    key
        A dotted key, such as optimizer.lr or plan.placement.shard.
    arguments
        A YAML or TOML file, and settings laid over it.
    json
        Print the explanation as JSON.
    """
    from fourfold.cli.explain import explain as describe
    from fourfold.cli.settings import load_any

    return show(describe(key, load_any(arguments) if arguments else None), json)


@schedules.command(name="list")
def list_schedules(*, json: Json = False) -> int:
    """Name all schedules.

    Parameters
    ----------
    json
        Print them as JSON.
    """
    from fourfold.cli.outcome import Listing
    from fourfold.cli.schedules import names

    return show(Listing("schedules", names()), json)


@schedules.command(name="draw")
def draw_schedule(
    name: str,
    /,
    *options: Annotated[str, Parameter(name="option=number")],
    stages: int,
    microbatches: int,
    times: Annotated[tuple[float, float, float], Parameter(negative="")] = (1.0, 1.0, 1.0),
    move: float = 0.0,
    out: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    json: Json = False,
) -> int:
    """Lay a schedule out in virtual time and draw it: F forward, B backward, I and W its halves, U update.

    Parameters
    ----------
    name
        The schedule; `fourfold schedule list` names them.
    options
        Further options of the schedule: chunks=4.
    stages
        Stages of the model; the schedule says how many of them a worker holds.
    microbatches
        Micro-batches of a step.
    times
        Of a stage's forward, backward by the input, backward by the weight.
    move
        Time of a transfer between two workers.
    out
        Files to write: a picture (.svg), a trace for Perfetto (.json, .json.gz).
    json
        Print shape and figures as JSON.
    """
    from pathlib import Path

    from fourfold.cli.schedules import laid
    from fourfold.schedule.costs import Costs

    return show(laid(name, stages, microbatches, options, Costs(*times, move), [Path(file) for file in out]), json)


@schedules.command(name="compare")
def compare_schedules(
    first: str,
    second: str,
    /,
    *,
    stages: int,
    microbatches: int,
    times: Annotated[tuple[float, float, float], Parameter(negative="")] = (1.0, 1.0, 1.0),
    move: float = 0.0,
    json: Json = False,
) -> int:
    """Lay two schedules out over the same model: both timelines, and the first action in which they differ.

    Parameters
    ----------
    first, second
        The schedules.
    stages
        Stages of the model.
    microbatches
        Micro-batches of a step.
    times
        Of a stage's forward, backward by the input, backward by the weight.
    move
        Time of a transfer between two workers.
    json
        Print the figures of both as JSON.
    """
    from fourfold.cli.schedules import Compared, laid
    from fourfold.schedule.costs import Costs

    costs = Costs(*times, move)
    both = laid(first, stages, microbatches, (), costs), laid(second, stages, microbatches, (), costs)
    return show(Compared(both), json)
