"""Runs when a Python starts that finds this folder on its path: programs below the interface.

The service's SDK asks one address past every setting: who the caller is, at a host of the cloud.
Here the question goes where ``AWS_ENDPOINT_URL`` says, as botocore's own do. And what its local
mode would give to an engine of containers goes to the interface, which runs it on this machine. No
file of the SDK is changed, and nothing but that. Needs the standard library alone: any Python may
find it.
"""

import importlib.machinery
import importlib.util
import os
import sys

_PACKAGES = ("sagemaker", "sagemaker_core")
_FUNCTION = "sts_regional_endpoint"
_LOCAL = "sagemaker.local.local_session"
_CODE = "sagemaker_submit_directory"
_FILE = "file://"
_HERE = os.path.dirname(os.path.abspath(__file__))


class _Finder:
    """Finds the modules of the SDK, and changes what is theirs as soon as it is there."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name.partition(".")[0] not in _PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):  # type: ignore[no-untyped-def]
                run(module)
                _change(module)  # type: ignore[no-untyped-call]

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _change(module):  # type: ignore[no-untyped-def]
    asked = vars(module).get(_FUNCTION)
    # Not where it is imported from the module that has it.
    if getattr(asked, "__module__", None) == module.__name__:
        setattr(module, _FUNCTION, lambda region: _endpoint() or asked(region))
    if module.__name__ == _LOCAL and _endpoint() and hasattr(module, "LocalSession"):
        module.LocalSession = _local_session(module.Session)  # type: ignore[no-untyped-call]


def _endpoint() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_STS") or os.environ.get("AWS_ENDPOINT_URL")


def _local_session(session):  # type: ignore[no-untyped-def]
    """Returns the class of local sessions: each session is one, since the interface is local."""

    class Kind(type(session)):  # type: ignore[misc]
        def __instancecheck__(cls, instance):  # type: ignore[no-untyped-def]
            return isinstance(instance, session)

    class LocalSession(session, metaclass=Kind):  # type: ignore[misc,valid-type]
        """A session whose jobs run on this machine, as those of any other do."""

        def __init__(  # type: ignore[no-untyped-def]
            self,
            boto_session=None,
            default_bucket=None,
            s3_endpoint_url=None,
            disable_local_code=False,
            **others,
        ):
            super().__init__(boto_session, default_bucket=default_bucket, **others)
            # Paths are places too, as the SDK has it.
            self.local_mode = True

        def _intercept_create_request(self, request, *others, **more):  # type: ignore[no-untyped-def]
            # Clients of botocore know no source of files; the interface takes paths by this one.
            for channel in request.get("InputDataConfig") or ():
                source = channel["DataSource"].pop("FileDataSource", None)
                if source is not None:
                    channel["DataSource"]["S3DataSource"] = {
                        "S3DataType": "S3Prefix",
                        "S3Uri": source["FileUri"],
                        "S3DataDistributionType": source["FileDataDistributionType"],
                    }
            values = request.get("HyperParameters") or {}
            code = values.get(_CODE, "").strip('"')
            if code.startswith(_FILE):
                # Relative to this program, which the interface is not.
                place = os.path.abspath(code[len(_FILE) :])
                values[_CODE] = f'"{_FILE}{place}"'
            return super()._intercept_create_request(request, *others, **more)

    return LocalSession


sys.meta_path.insert(0, _Finder)

# One that this one stands before.
_others = [place for place in sys.path if os.path.abspath(place) != _HERE]
_next = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
