from __future__ import annotations

import pytest

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.launcher.mpi_options import translate

NO_COPY = ["--mca", "smsc", "^cma,xpmem,knem"]
#: How the training toolkit starts a job.
TOOLKIT_LINE = (
    "--host h1:8,h2:8 -np 16 --allow-run-as-root --display-map --tag-output "
    "-mca btl_tcp_if_include eth0 -mca oob_tcp_if_include eth0 -mca plm_rsh_no_tree_spawn 1 "
    "-bind-to none -map-by slot -mca pml ob1 -mca btl ^openib "
    "-mca orte_abort_on_non_zero_status 1 -mca btl_vader_single_copy_mechanism none "
    "-x NCCL_MIN_NRINGS=4 -x NCCL_SOCKET_IFNAME=eth0 -x NCCL_DEBUG -x LD_LIBRARY_PATH -x PATH "
    "-x LD_PRELOAD=/lib/gethostname.so "
    "-mca btl_vader_single_copy_mechanism none -x NCCL_PROTO=simple -x NCCL_PROTO=simple"
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("-bind-to none", ["--bind-to", "none"]),
        ("-map-by slot", ["--map-by", "slot"]),
        ("-mca btl_vader_single_copy_mechanism none", NO_COPY),
        ("--mca btl_vader_single_copy_mechanism cma", ["--mca", "smsc", "cma"]),
        ("--mca btl_vader_eager_limit 4096", ["--mca", "btl_sm_eager_limit", "4096"]),
        ("-mca pml ob1", ["--mca", "pml", "ob1"]),
        ("-mca btl ^openib", []),
        ("-mca btl ^openib,tcp", ["--mca", "btl", "^tcp"]),
        ("-mca btl self,vader,tcp", ["--mca", "btl", "self,sm,tcp"]),
        ("-mca plm_rsh_no_tree_spawn 1", ["--prtemca", "plm_ssh_no_tree_spawn", "1"]),
        ("--mca plm_rsh_agent 'ssh -q'", ["--prtemca", "plm_ssh_agent", "ssh -q"]),
        ("-mca orte_abort_on_non_zero_status 1", []),
        (
            "-mca orte_abort_on_non_zero_status 0",
            ["--runtime-options", "error-nonzero-status=0"],
        ),
        ("-mca orte_tmpdir_base /t", ["--prtemca", "prte_tmpdir_base", "/t"]),
        ("-mca btl_tcp_if_include eth0", ["--mca", "btl_tcp_if_include", "eth0"]),
        ("-mca oob_tcp_if_include eth0", ["--prtemca", "oob_tcp_if_include", "eth0"]),
        ("-mca oob_tcp_if_include lo", []),
        ("--prtemca oob_tcp_if_include eth0", ["--prtemca", "oob_tcp_if_include", "eth0"]),
        ("--tag-output --allow-run-as-root --oversubscribe", []),
        ("--display-map", ["--display", "map"]),
        ("--bind-to=core", ["--bind-to", "core"]),
        ("--unheard-of 1 2 -v --last", ["--unheard-of", "1", "2", "-v", "--last"]),
        ("--mca a -1", ["--mca", "a", "-1"]),
        ("", []),
    ],
)
def test_options(given: str, expected: list[str]) -> None:
    assert translate(given).arguments() == expected


def test_what_smprun_sets_itself_is_taken_out() -> None:
    options = translate("-np 4 -H a:2,b:2 -x A=1 -x B -x C= -x 'D=two words'")
    assert options.arguments() == []
    assert options.num_ranks == 4
    assert options.hosts == "a:2,b:2"
    assert options.exports == {"A": "1", "B": None, "C": "", "D": "two words"}


def test_options_of_the_toolkit_are_variables() -> None:
    options = translate("--NCCL_DEBUG=INFO --tag-output --NCCL_SOCKET_IFNAME ens5 -x A=1 -N 2")
    assert options.exports == {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "ens5", "A": "1"}
    assert options.arguments() == ["-N", "2"]
    with pytest.raises(ConfigError, match=r"--NCCL_DEBUG takes 1 value\(s\); received \[\]"):
        translate("-x A=1 --NCCL_DEBUG")


def test_exact_duplicates_are_dropped() -> None:
    twice = "--mca btl_vader_single_copy_mechanism none --display-map -np 2 -x A=1 " * 2
    assert translate(twice) == translate(twice[: len(twice) // 2])


def test_the_last_value_of_a_variable_counts() -> None:
    assert translate("-x A=1 -x A=2").exports == {"A": "2"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-x 'A=1", "No closing quotation in .*-x 'A=1"),
        ("--mca pml", r"--mca takes 2 value\(s\); received \['pml'\]"),
        ("--mca pml ob1 train.py", "'train.py' in .* belongs to no option"),
        ("--mca pml ob1 --mca pml cm", "pml has 'ob1' and 'cm'"),
        ("-np 2 -n 4", "-n has '2' and '4'"),
        ("-np two", "must be an integer; received 'two'"),
    ],
)
def test_wrong_options(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate(text)


def test_the_toolkits_whole_line() -> None:
    options = translate(TOOLKIT_LINE)
    assert " ".join(options.arguments()) == (
        "--display map --mca btl_tcp_if_include eth0 --prtemca oob_tcp_if_include eth0 "
        "--prtemca plm_ssh_no_tree_spawn 1 --bind-to none --map-by slot --mca pml ob1 "
        "--mca smsc ^cma,xpmem,knem"
    )
    assert (options.num_ranks, options.hosts) == (16, "h1:8,h2:8")
    assert options.exports == {
        "NCCL_MIN_NRINGS": "4",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_DEBUG": None,
        "LD_LIBRARY_PATH": None,
        "PATH": None,
        "LD_PRELOAD": "/lib/gethostname.so",
        "NCCL_PROTO": "simple",
    }
