"""`fabricate push`: push the model of a run to the Hugging Face Hub.

Owns the options and the output. Must not know: how the card is made, the calls of the hub. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

import click

from fabricate.errors import ConfigurationError


@click.command()
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("repo", metavar="REPO")
@click.option(
    "--license", metavar="NAME", help="The license in the model card, by its name on the hub: apache-2.0, mit, ..."
)
@click.option(
    "--dataset",
    "datasets",
    metavar="NAME",
    multiple=True,
    help="A data set in the model card, by its name on the hub; repeatable.",
)
@click.option("--private", is_flag=True, help="If REPO does not exist yet, create it private.")
@click.option("--revision", metavar="BRANCH", help="A branch of REPO that exists; default: main.")
@click.option("--message", default="Push the model", help="Of the commit.")
def push(
    run_dir: Path,
    repo: str,
    license: str | None,
    datasets: tuple[str, ...],
    private: bool,
    revision: str | None,
    message: str,
) -> None:
    """Push RUN_DIR/model/ to the model repository REPO ("user/name") of the Hugging Face Hub, with a model card.

    The card, RUN_DIR/model/README.md, is made from the plan, the data, the versions, and the last validation up to these weights, if the
    last fit wrote them. A README.md that is there keeps its text. What REPO has already is not sent again, so a push that failed goes on
    where it was. Log in with `hf auth login`, or set HF_TOKEN; HF_ENDPOINT names another hub.

    \b
    Examples:
      fabricate push runs/first user/name --license apache-2.0
      fabricate push runs/first user/name --private --dataset stanfordnlp/imdb
    """
    from fabricate.callbacks.hub_repository import HubRepository
    from fabricate.callbacks.model_card import write_card

    folder = run_dir / "model"
    if not folder.is_dir():
        raise ConfigurationError(
            f"{str(run_dir)!r} has no folder model/. A run writes it when it completes. To write it from the "
            f"newest checkpoint: fabricate ckpt export {run_dir} {folder} --format transformers"
        )
    repository = HubRepository(repo, private=private or None, revision=revision)
    repository.open()
    write_card(run_dir, folder, repository.repo, license=license, datasets=datasets)
    click.echo(f"pushed {folder}: {repository.push(folder, message)}")
