"""Run four clients in Flower's simulation engine (pip install 'flwr[simulation]==1.41.0').

python examples/flower/simulate.py
"""

import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
here = str(Path(__file__).parent)
sys.path.insert(0, here)
os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])  # ray's too

from flwr.simulation import run_simulation  # noqa: E402
from tiers import client, server  # noqa: E402

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=4, backend_config=resources)
