"""Run by test_doctor.py: `python -m tests.e2e.nccl_tests_on_nodes`: nccl-tests (what is on the PATH) over the nodes of a Ray cluster, by its actors."""

import asyncio
import json
import sys

import ray
import ray.util

from cluster.preflight.nccl_tests import measure_over_nodes
from cluster.preflight.ray_nodes import living_nodes
from tests.deploy.ray_nodes import ray_of_nodes

if __name__ == "__main__":
    cluster = ray_of_nodes(1)
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    found = asyncio.run(measure_over_nodes(living_nodes(), 1, ray.util.get_node_ip_address(), 0))
    ray.shutdown()
    cluster.shutdown()
    sys.stdout.write(json.dumps([finding.as_dict() for finding in found.findings]) + "\n")
