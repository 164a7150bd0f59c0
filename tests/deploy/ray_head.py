"""A Ray of its own with a dashboard, as a child process: prints the dashboard's address, ends when its input does.

python -m tests.deploy.ray_head NUM_CPUS"""

import sys

import ray
from ray._private import node

from cluster.deploy.ray_node import PatientNode


def main() -> None:
    node.Node = PatientNode
    context = ray.init(
        address="local",
        num_cpus=int(sys.argv[1]),
        num_gpus=0,
        include_dashboard=True,
        dashboard_port=0,
        log_to_driver=False,
        logging_level="ERROR",
    )
    sys.stdout.write(f"http://{context.dashboard_url}\n")
    sys.stdout.flush()
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
