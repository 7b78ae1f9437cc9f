"""Uploading an export to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from neox.errors import ConversionError


def upload(directory: Path, repository: str) -> str:
    """Create the repository `USER/NAME` if needed (private) and upload a directory; return its address.

    Needs the package huggingface_hub and a login (`hf auth login`, or HF_TOKEN). Raises ConversionError.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = api.create_repo(repository, exist_ok=True, private=True)
        api.upload_folder(folder_path=str(directory), repo_id=repository)
    except Exception as error:  # a failed connection is of whichever HTTP library the hub's client is built on
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConversionError(
            f"{directory} was exported, but uploading it to {repository} failed: {reason}; "
            f"log in with `hf auth login` and repeat with `hf upload {repository} {directory}`"
        ) from error
    return str(address)
