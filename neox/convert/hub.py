"""Models on the Hugging Face hub: download for an import, and upload of an export.

Both need the package huggingface_hub. Private models need a login (`hf auth login`) or a token in HF_TOKEN.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from neox.convert.hf_directory import CONFIG
from neox.errors import ConfigError, ConversionError
from neox.storage import proxy_advice

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_ENDINGS = (".json", ".jinja", ".model", ".txt")
"""Files of a model besides its weights: configuration and tokenizer."""


@dataclass(frozen=True)
class Source:
    """A model to import.

    Attributes:
        directory: Directory with its files.
        name: Its name for messages: that of the directory, or the repository and its commit.
    """

    directory: Path
    name: str


def find_source(given: str, revision: str | None = None) -> Source:
    """Return the model that a command names: a directory, or else a repository of the hub, whose files are downloaded.

    Args:
        given: A directory, or `ORGANISATION/NAME`.
        revision: Branch, tag or commit of the repository; None takes its main branch.

    Raises:
        ConfigError: If there is neither such a directory nor such a repository, or a revision is given for a directory.
        ConversionError: If the hub cannot be reached, or refuses.
    """
    directory = Path(given)
    if directory.exists() or not _REPOSITORY.fullmatch(given):
        if revision is not None:
            raise ConfigError(f"--revision {revision}: {given} is a directory, which has no revisions")
        return Source(directory, directory.name)
    return _download(given, revision)


def _download(repository: str, revision: str | None) -> Source:
    """Download configuration, tokenizer and weights of a repository into the hub's cache. Finished files are kept."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    named = repository if revision is None else f"{repository}, revision {revision}"
    try:
        found = HfApi().model_info(repository, revision=revision)
        names = wanted_files(map(attrgetter("rfilename"), found.siblings or ()))
        directory = snapshot_download(repository, revision=found.sha, allow_patterns=names)
    except GatedRepoError as error:
        raise ConversionError(
            f"{named}: the hub gives this model only to those who asked for it: accept its terms on its page, and log "
            "in with `hf auth login` or HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{named}: the hub has the model, and no such revision") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{named}: no such directory, and no such model on the hub; if it is private, log in with `hf auth login` "
            "or HF_TOKEN"
        ) from error
    except Exception as error:  # connection errors are those of the HTTP library that the hub's client uses
        raise ConversionError(
            f"{named}: no such directory, and the hub cannot be asked for such a model: {_reason(error)}; download it "
            f"on a machine with a network by `hf download {repository} --local-dir DIRECTORY`, and give that directory"
            f"{proxy_advice(error)}"
        ) from error
    if CONFIG not in names:
        raise ConversionError(f"{named}: the repository has no {CONFIG}, so it is no model of transformers")
    return Source(Path(directory), f"{repository} (commit {found.sha})")


def wanted_files(names: Iterable[str]) -> list[str]:
    """Return the files of a repository that an import reads: its weights once, as safetensors if there are any."""
    described = []
    safetensors = []
    pickled = []
    for name in sorted(names):
        if "/" in name:  # the same weights in other formats
            continue
        if name.endswith(_ENDINGS):
            described.append(name)
        elif name.endswith(".safetensors"):
            safetensors.append(name)
        elif name.endswith(".bin"):
            pickled.append(name)
    return described + (safetensors or pickled)


def upload(directory: Path, repository: str, revision: str | None = None) -> str:
    """Upload a directory to the hub.

    Args:
        directory: Directory to upload.
        repository: `USER/NAME`. If it does not exist, it is created as a private one.
        revision: Branch to upload to, which is created; None for the main branch.

    Returns:
        The repository's address.

    Raises:
        ConversionError: If it fails.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = api.create_repo(repository, exist_ok=True, private=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        api.upload_folder(folder_path=str(directory), repo_id=repository, revision=revision)
    except Exception as error:  # connection errors are those of the HTTP library that the hub's client uses
        raise ConversionError(
            f"{directory} was exported, but uploading it to {repository} failed: {_reason(error)}; "
            f"log in with `hf auth login` and repeat with `hf upload {repository} {directory}`"
        ) from error
    return str(address)


def _reason(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
