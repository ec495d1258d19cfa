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
#: The same of version 3, whose local mode has no session.
_CONTAINER, _CONTAINER_KIND = "sagemaker.train.local.local_container", "_LocalContainer"
_MAX_RUNTIME_SECONDS = 86400
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
    if module.__name__ == _CONTAINER and _endpoint() and hasattr(module, _CONTAINER_KIND):
        getattr(module, _CONTAINER_KIND).train = _run_here


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


def _run_here(container, wait=True):  # type: ignore[no-untyped-def]
    """Runs what a container would, as a job; waits for its end, since its code is a passing file.

    Returns the model's archive, which lies where local mode has it: with another one of the
    output in ``compressed_artifacts``, and unpacked in ``artifacts``.
    """
    import glob
    import shutil

    import boto3

    jobs = importlib.import_module("sagemaker.core.resources").TrainingJob
    root = os.path.abspath(container.container_root)
    packed = os.path.join(root, "compressed_artifacts")
    boto3.client("sagemaker").create_training_job(
        TrainingJobName=container.training_job_name,
        RoleArn="arn:aws:iam::123456789012:role/local",
        AlgorithmSpecification={
            "TrainingImage": container.image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": container.container_entrypoint or ["none"],
            "ContainerArguments": container.container_arguments or ["none"],
        },
        HyperParameters=container.hyper_parameters,
        Environment=container.environment,
        InputDataConfig=[_channel(each) for each in container.input_data_config],  # type: ignore[no-untyped-call]
        OutputDataConfig={"S3OutputPath": packed},
        ResourceConfig={
            "InstanceType": container.instance_type,
            "InstanceCount": container.instance_count,
            "VolumeSizeInGB": 1,
        },
        StoppingCondition={"MaxRuntimeInSeconds": _MAX_RUNTIME_SECONDS},
    )
    jobs.get(container.training_job_name).wait(poll=1, logs=True)
    for archive in glob.glob(os.path.join(packed, container.training_job_name, "output", "*.gz")):
        name = os.path.basename(archive)
        shutil.copyfile(archive, os.path.join(packed, name))
        shutil.unpack_archive(archive, os.path.join(root, "artifacts", name.partition(".")[0]))
    return f"{_FILE}{packed}/model.tar.gz"


def _channel(given):  # type: ignore[no-untyped-def]
    source = given.data_source
    # A path is in the place of a file system, and an address in its own.
    path = getattr(source.file_system_data_source, "directory_path", None)
    address = os.path.abspath(path) if path else source.s3_data_source.s3_uri
    return {
        "ChannelName": given.channel_name,
        "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": address}},
    }


sys.meta_path.insert(0, _Finder)

# One that this one stands before.
_others = [place for place in sys.path if os.path.abspath(place) != _HERE]
_next = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
