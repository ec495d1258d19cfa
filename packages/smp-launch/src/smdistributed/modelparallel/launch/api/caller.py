"""Who the caller is: one role, which ``get_execution_role`` of the SDK finds as on the service."""

from __future__ import annotations

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.iam.models import iam_backends

from smdistributed.modelparallel.launch.session import ACCOUNT, ROLE

_PARTITION = "aws"
_NAME = ROLE.rpartition("/")[2]
_ANSWER = f"""\
<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<GetCallerIdentityResult><Arn>arn:aws:sts::{ACCOUNT}:assumed-role/{_NAME}/smp-launch</Arn>
<UserId>AROALOCAL:smp-launch</UserId><Account>{ACCOUNT}</Account></GetCallerIdentityResult>
<ResponseMetadata><RequestId>local</RequestId></ResponseMetadata>
</GetCallerIdentityResponse>"""


def make_role() -> None:
    """Lets the role be found by its name, as anybody may ask for it."""
    index = iam_backends[DEFAULT_ACCOUNT_ID][_PARTITION]
    if not any(role.name == _NAME for role in index.get_roles()):
        index.create_role(_NAME, "{}", "/", None, "", [], None)


def answer(service: str, body: bytes) -> bytes | None:
    """Returns the answer to the question who the caller is; None where that is not the question."""
    if service == "sts" and b"Action=GetCallerIdentity" in body.split(b"&"):
        return _ANSWER.encode()
    return None
