"""Run a SuperLink and four SuperNodes as processes on this machine, one per tier.

    python examples/flower/processes.py [model.safetensors]

On several machines, run the same commands with the addresses and certificates of these machines.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE, BIN = Path(__file__).parent.resolve(), Path(sys.executable).parent
TIERS = ("0.125", "0.25", "0.5", "1.0")


def free_ports(count: int) -> list[int]:
    """Return free ports."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait_for(port: int, seconds: int = 120) -> None:
    """Wait until a process listens on the port."""
    for _ in range(seconds):
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(1)
    sys.exit(f"no process listens on port {port} after {seconds} s")


def main(file: Path) -> int:
    link, *nodes = free_ports(1 + len(TIERS))
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as home:
        address = f'[superlink.here]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
        (Path(home) / "config.toml").write_text(address)
        path = os.pathsep.join([str(BIN), os.environ["PATH"]])  # a SuperLink starts others by name
        told = {"FLWR_HOME": home, "FLWR_TELEMETRY_ENABLED": "0", "PATH": path}
        environment = os.environ | told

        def start(program: str, *arguments: str) -> None:
            command = [str(BIN / program), "--insecure", *arguments]
            started.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))

        try:
            # apps run in this environment: nothing is downloaded
            here = ("--host", "127.0.0.1", "--disable-runtime-dependency-installation")
            start("flower-superlink", "--port", str(link), *here)
            wait_for(link)
            for part, (tier, port) in enumerate(zip(TIERS, nodes, strict=True)):
                start(
                    "flower-supernode", "--superlink", f"127.0.0.1:{link}", "--port", str(port),
                    "--node-config", f"partition-id={part} tier={tier}",
                )  # fmt: skip
            run = [BIN / "flwr", "run", HERE, "here", "--stream", "-c", f'file="{file.resolve()}"']
            done = subprocess.run([*map(str, run)], env=environment, check=False)
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(30)
    return done.returncode if file.exists() else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the others too
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "model.safetensors")))
