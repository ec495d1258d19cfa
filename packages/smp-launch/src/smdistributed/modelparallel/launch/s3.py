"""Copies between folders and addresses, by the names that notebooks have for them.

Source: estimator interface, section 2 (inputs); the public interface of the service's SDK.
"""

from __future__ import annotations

from pathlib import Path

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.session import Session
from smdistributed.modelparallel.launch.storage.places import locate
from smdistributed.modelparallel.launch.storage.transfer import download_all

__all__ = ["S3Downloader", "S3Uploader", "parse_s3_url"]


def parse_s3_url(url: str) -> tuple[str, str]:
    """Returns bucket and key of ``s3://bucket/key``.

    Raises:
        ConfigError: it is no such address.
    """
    if not url.startswith("s3://"):
        raise ConfigError(f"an address of an object store begins with s3://; got {url!r}.")
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return bucket, key.strip("/")


class S3Uploader:
    """Copies to an address."""

    @staticmethod
    def upload(
        local_path: str,
        desired_s3_uri: str,
        kms_key: str | None = None,
        sagemaker_session: Session | None = None,
    ) -> str:
        """Copies a file, or the files of a folder; returns their address."""
        bucket, key = parse_s3_url(desired_s3_uri)
        return _session(sagemaker_session).upload_data(local_path, bucket, key)


class S3Downloader:
    """Copies from an address."""

    @staticmethod
    def download(
        s3_uri: str,
        local_path: str,
        kms_key: str | None = None,
        sagemaker_session: Session | None = None,
    ) -> list[str]:
        """Copies what begins with an address or a path to a folder; returns the files."""
        location = locate(s3_uri, _session(sagemaker_session).root)
        return download_all(location, Path(local_path))

    @staticmethod
    def list(s3_uri: str, sagemaker_session: Session | None = None) -> list[str]:
        """Returns the addresses that begin with this one."""
        location = locate(s3_uri, _session(sagemaker_session).root)
        return [f"s3://{key}" for key in sorted(location.files.find(location.path))]

    @staticmethod
    def read_file(s3_uri: str, sagemaker_session: Session | None = None) -> str:
        """Returns the text of a file."""
        location = locate(s3_uri, _session(sagemaker_session).root)
        return str(location.files.cat_file(location.path).decode())


def _session(given: object) -> Session:
    return given if isinstance(given, Session) else Session()
