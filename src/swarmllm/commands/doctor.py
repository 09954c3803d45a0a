"""`swarmllm doctor`: check this machine and network for a server or client, and name what to mend.

This module defines the flags and prints the report. The exit status is 1 if anything is wrong. The checks are in
`doctor_checks`.
"""

import sys
from collections.abc import Iterable, Sequence

from swarmllm.command_line import Parser, run_command
from swarmllm.commands.doctor_findings import DoctorConfig, Finding, Verdict, check_versions
from swarmllm.config import ModelConfig, PeerConfig, SwarmConfig
from swarmllm.server.settings import BlocksConfig

EXAMPLES = """examples:
  swarmllm doctor                         # this machine, and the local network
  swarmllm doctor --model M --port 31337              # as a server would start
  swarmllm doctor --model M --memory 24 24 16         # which bits fit there
  swarmllm doctor --initial_peers ADDRESS   # whether a swarm can be reached
"""


async def examine(config: DoctorConfig) -> int:
    """Make all checks and print what they find. Returns the number of bad findings."""
    num_bad = 0

    def report(name: str, findings: Iterable[Finding]) -> None:
        nonlocal num_bad
        for finding in findings:
            print(f"{finding.verdict:<5} {name:<9} {finding.text}", flush=True)
            num_bad += finding.verdict is Verdict.BAD

    report("versions", check_versions())
    from swarmllm.commands import doctor_checks as checks  # it imports torch, which may be missing

    report("device", checks.check_device(config))
    report("model", checks.check_model(config))
    report("memory", checks.check_memory(config))
    report("disk", checks.check_disk(config))
    report("identity", checks.check_identity(config))
    report("network", await checks.check_listening(config))
    report("swarm", await checks.check_swarm(config))
    print(f"\n{num_bad} to mend." if num_bad else "\nNothing to mend.")
    return num_bad


def build_parser() -> Parser:
    """A flag for each field of DoctorConfig, named as those of the server."""
    parser = Parser(
        prog="swarmllm doctor", description="Check this machine and network, and name what to mend.", epilog=EXAMPLES
    )
    classes = [DoctorConfig, ModelConfig, BlocksConfig, SwarmConfig, PeerConfig]
    parser.add_settings(DoctorConfig, classes, without=["stop_on_stdin_eof"])
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""

    async def run() -> int:
        config = DoctorConfig(**build_parser().parse_settings(argv))
        return 1 if await examine(config) else 0

    return run_command(run, default_log_level="ERROR")


if __name__ == "__main__":
    sys.exit(main())
