"""What Hugging Face's hub and ModelScope have of a model."""

import os
from urllib.parse import quote, urlencode

import httpx

from core.errors import ConfigError, first_line
from models.files.pulled_names import PulledName
from models.pulling.http_files import check_status, http_reader, hub_endpoint
from models.pulling.remote_files import Interrupted, RemoteFile


def files_of_hub(client: httpx.Client, name: PulledName) -> list[RemoteFile]:
    """Return the files of a revision, which is read once: a branch that moves meanwhile changes nothing. Raises Interrupted and
    ConfigError."""
    # Half a second of processor time, which other places do not need.
    from huggingface_hub import HfApi, hf_hub_url  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled  # noqa: PLC0415
    from huggingface_hub.hf_api import RepoFile  # noqa: PLC0415
    from huggingface_hub.utils import build_hf_headers  # noqa: PLC0415

    hub = hub_endpoint()
    api, headers = HfApi(endpoint=hub), build_hf_headers(library_name="baton")
    try:
        commit = api.model_info(name.path, revision=name.revision or None).sha
        entries = list(api.list_repo_tree(name.path, recursive=True, revision=commit))
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError, ValueError) as error:
        raise ConfigError(f"cannot get {name.text} from the hub: {first_line(error)}") from None
    except Exception as error:
        # The library's own copy of httpx has errors of its own.
        if type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore"):
            raise Interrupted(f"the hub: {error or type(error).__name__}") from None
        raise
    return [
        RemoteFile(
            path=entry.path,
            num_bytes=entry.size,
            version=entry.lfs.sha256 if entry.lfs else entry.blob_id,
            sha256=entry.lfs.sha256 if entry.lfs else "",
            git_sha1="" if entry.lfs else entry.blob_id,
            read=http_reader(
                client, hf_hub_url(name.path, entry.path, revision=commit, endpoint=hub), headers
            ),
        )
        for entry in entries
        if isinstance(entry, RepoFile)
    ]


def files_of_modelscope(client: httpx.Client, name: PulledName) -> list[RemoteFile]:
    """Return the files of a revision. Raises Interrupted and ConfigError."""
    domain = os.environ.get("MODELSCOPE_DOMAIN") or "www.modelscope.cn"
    root = f"{domain if '://' in domain else f'https://{domain}'}/api/v1/models/{quote(name.path)}/repo"
    token = os.environ.get("MODELSCOPE_API_TOKEN")
    headers = {"Authorization": f"Bearer {token}", "Cookie": f"m_session_id={token}"} if token else {}
    revision = name.revision or "master"
    try:
        answer = client.get(
            f"{root}/files", params={"Revision": revision, "Recursive": "true"}, headers=headers
        )
        check_status(answer)
        entries = answer.json()["Data"]["Files"]
        return [
            RemoteFile(
                path=entry["Path"],
                num_bytes=int(entry["Size"]),
                version=entry["Sha256"],
                sha256=entry["Sha256"],
                read=http_reader(
                    client, f"{root}?{urlencode({'Revision': revision, 'FilePath': entry['Path']})}", headers
                ),
            )
            for entry in entries
            if entry["Type"] == "blob" and entry["Sha256"]
        ]
    except httpx.TransportError as error:
        raise Interrupted(f"{httpx.URL(root).host}: {error or type(error).__name__}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"ModelScope lists no files of {name.path} at {revision}: {error or 'no answer'}"
        ) from None
