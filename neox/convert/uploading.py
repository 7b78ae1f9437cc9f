"""Uploading an export to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from neox.errors import ConversionError


def upload(directory: Path, repository: str) -> str:
    """Create the repository `USER/NAME` if needed (private) and upload a directory; return its address.

    Needs the package huggingface_hub and a login (`hf auth login`, or HF_TOKEN). Raises ConversionError.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        api = HfApi()
        address = api.create_repo(repository, exist_ok=True, private=True)
        api.upload_folder(folder_path=str(directory), repo_id=repository)
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        raise ConversionError(
            f"{directory} was exported, but uploading it to {repository} failed: {str(error).strip().splitlines()[0]}; "
            "log in with `hf auth login` and repeat with `hf upload`"
        ) from error
    return str(address)
