"""The object store of the interface is files: what boto3 writes stays, what is there is seen."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from smdistributed.modelparallel.launch.api import server
from smdistributed.modelparallel.launch.session import Session
from smdistributed.modelparallel.launch.storage import places

pytestmark = pytest.mark.timeout(120)


@contextmanager
def store(root: Path) -> Iterator[Any]:
    with server.serving(Session(root=root)):
        # Jobs and sessions go to the files themselves.
        assert not places.has_object_store()
        yield boto3.session.Session().client("s3")


def keys(client: Any, **given: Any) -> list[str]:
    found = client.list_objects_v2(Bucket="bucket", **given)
    return [each["Key"] for each in found.get("Contents", [])]


def test_objects_are_files_and_outlive_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "s3/bucket"
    with store(tmp_path) as client:
        client.create_bucket(Bucket="bucket")
        client.put_object(Bucket="bucket", Key="a/b c", Body=b"first")
        assert (folder / "a/b c").read_bytes() == b"first"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        client.put_object(Bucket="bucket", Key="a/b c", Body=b"second")
        client.copy_object(Bucket="bucket", Key="copy", CopySource="bucket/a/b c")
        whole = tmp_path / "whole"
        whole.write_bytes(bytes(range(256)) * (1 << 16))
        parts = TransferConfig(multipart_threshold=1 << 20, multipart_chunksize=6 << 20)
        client.upload_file(str(whole), "bucket", "large", Config=parts)
        assert (folder / "large").read_bytes() == whole.read_bytes()
    (folder / "by hand").write_bytes(b"third")
    with store(tmp_path) as client:
        assert [each["Name"] for each in client.list_buckets()["Buckets"]] == ["bucket"]
        assert keys(client) == ["a/b c", "by hand", "copy", "large"]
        assert keys(client, Prefix="a/") == ["a/b c"]
        for key, body in (("a/b c", b"second"), ("by hand", b"third"), ("copy", b"second")):
            assert client.get_object(Bucket="bucket", Key=key)["Body"].read() == body
        client.download_file("bucket", "large", str(tmp_path / "got"))
        assert (tmp_path / "got").read_bytes() == whole.read_bytes()
        ranged = client.get_object(Bucket="bucket", Key="large", Range="bytes=255-256")
        assert ranged["Body"].read() == b"\xff\x00"
        # While it runs, too.
        (folder / "by hand").write_bytes(b"changed")
        assert client.get_object(Bucket="bucket", Key="by hand")["Body"].read() == b"changed"
        (folder / "by hand").unlink()
        with pytest.raises(ClientError, match="NoSuchKey"):
            client.get_object(Bucket="bucket", Key="by hand")
        client.delete_object(Bucket="bucket", Key="copy")
        assert not (folder / "copy").exists()
        client.delete_objects(Bucket="bucket", Delete={"Objects": [{"Key": "large"}]})
        assert [path.name for path in folder.iterdir()] == ["a"]
        assert keys(client) == ["a/b c"]


@pytest.mark.parametrize("key", ["a//b", "a/b/c", "../up", "a/./b", "a"])
def test_a_key_that_is_no_path_of_a_file_is_refused(tmp_path: Path, key: str) -> None:
    with store(tmp_path) as client:
        client.create_bucket(Bucket="bucket")
        client.put_object(Bucket="bucket", Key="a/b", Body=b"x")
        with pytest.raises(ClientError, match="a key is the path of a file"):
            client.put_object(Bucket="bucket", Key=key, Body=b"y")
        assert keys(client) == ["a/b"]
        assert not list(tmp_path.rglob("up"))
