"""Who the caller is: one role, which ``get_execution_role`` of the SDK finds as on the service.

Roles do nothing here. So each one that is asked for is there, the service may assume it, and it may
do what it is asked about: version 3 of the SDK looks at all of that before it starts a job.
"""

from __future__ import annotations

import html
import json
from urllib.parse import parse_qsl

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.iam.models import iam_backends

from smdistributed.modelparallel.launch.request.naming import ACCOUNT
from smdistributed.modelparallel.launch.session import ROLE

_PARTITION = "aws"
_NAME = ROLE.rpartition("/")[2]
_TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "sagemaker.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    ],
}
_IDENTITY = f"""\
<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<GetCallerIdentityResult><Arn>arn:aws:sts::{ACCOUNT}:assumed-role/{_NAME}/smp-launch</Arn>
<UserId>AROALOCAL:smp-launch</UserId><Account>{ACCOUNT}</Account></GetCallerIdentityResult>
<ResponseMetadata><RequestId>local</RequestId></ResponseMetadata>
</GetCallerIdentityResponse>"""
_SIMULATED = """\
<SimulatePrincipalPolicyResponse xmlns="https://iam.amazonaws.com/doc/2010-05-08/">
<SimulatePrincipalPolicyResult><IsTruncated>false</IsTruncated>
<EvaluationResults>{}</EvaluationResults></SimulatePrincipalPolicyResult>
<ResponseMetadata><RequestId>local</RequestId></ResponseMetadata>
</SimulatePrincipalPolicyResponse>"""
_ALLOWED = """\
<member><EvalActionName>{}</EvalActionName><EvalResourceName>*</EvalResourceName>
<EvalDecision>allowed</EvalDecision></member>"""


def answer(service: str, body: bytes) -> bytes | None:
    """Returns the answer to a question about the caller or a role; None where moto has it."""
    if service not in ("sts", "iam"):
        return None
    asked = dict(parse_qsl(body.decode(errors="replace")))
    action = asked.get("Action")
    if action == "GetCallerIdentity":
        return _IDENTITY.encode()
    if action == "SimulatePrincipalPolicy":
        names = (text for name, text in asked.items() if name.startswith("ActionNames."))
        return _SIMULATED.format(
            "".join(_ALLOWED.format(html.escape(each)) for each in names)
        ).encode()
    if action == "GetRole":
        _make_role(asked.get("RoleName", _NAME))
    return None


def _make_role(name: str) -> None:
    """Lets a role be found by its name, unless it is there."""
    index = iam_backends[DEFAULT_ACCOUNT_ID][_PARTITION]
    if not any(role.name == name for role in index.get_roles()):
        index.create_role(name, json.dumps(_TRUST), "/", None, "", [], None)
