"""A model repository of the Hugging Face Hub: check that it can be written to, and push a folder.

Owns the calls of huggingface_hub, which is imported only here and in `model_card`. Must not know: runs, ranks.
"""

from __future__ import annotations

from pathlib import Path

from fabricate.errors import ConfigurationError, FabricateError


class HubRepository:
    """The model repository `repo`: "user/name", or "name" for the logged-in user's.

    private: whether a new repository is private; None: the user's setting on the hub decides. token, endpoint: by default those of
    huggingface_hub (HF_TOKEN or `hf auth login`; HF_ENDPOINT). revision: an existing branch; default: main.
    """

    def __init__(
        self,
        repo: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> None:
        if not isinstance(repo, str) or not repo:
            raise ConfigurationError(f"repo={repo!r}: give the name of a model repository, 'user/name'")
        self.repo, self.private, self.revision = repo, private, revision
        self._token, self._endpoint = token, endpoint

    def open(self) -> None:
        """Create the repository if it does not exist. Raises `ConfigurationError` if the hub cannot be reached, there is no token, or the
        token does not allow writing."""
        from huggingface_hub import HfApi, constants

        api = HfApi(endpoint=self._endpoint, token=self._token)
        if constants.HF_HUB_OFFLINE:
            raise ConfigurationError(
                f"pushing to {self.repo!r}: HF_HUB_OFFLINE is set, so nothing can be pushed. Unset it, or push later with "
                "fabricate push RUN_DIR REPO"
            )
        try:
            api.whoami()
            self.repo = api.create_repo(self.repo, private=self.private, exist_ok=True).repo_id
        except Exception as exc:
            raise ConfigurationError(
                f"pushing to {self.repo!r} at {api.endpoint} is not possible: {_reason(exc)}. Log in with `hf auth login`, or set "
                "HF_TOKEN to a token that may write, or push later with fabricate push RUN_DIR REPO"
            ) from exc

    def push(self, folder: Path, message: str) -> str:
        """Push the files of `folder`; return the URL of the commit. Files that the repository already has (by digest) are not sent again,
        so that a failed push can be continued. Other files of the repository stay. Raises `FabricateError` if the push fails."""
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self._endpoint, token=self._token)
        try:
            done = api.upload_folder(
                repo_id=self.repo, folder_path=folder, commit_message=message, revision=self.revision
            )
        except Exception as exc:
            raise FabricateError(f"pushing {folder} to {self.repo!r} at {api.endpoint} failed: {_reason(exc)}") from exc
        return str(done.commit_url)


def _reason(exc: BaseException) -> str:
    """`exc` and its causes, on one line."""
    cause = f" ({_reason(exc.__cause__)})" if exc.__cause__ is not None else ""
    return f"{type(exc).__name__}: {' '.join(str(exc).split())}{cause}"
