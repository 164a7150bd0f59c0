"""A Ray of several nodes on this machine."""

from ray.cluster_utils import Cluster


def ray_of_nodes(num_cpus: int) -> Cluster:
    """Its head, with a dashboard at a port that the kernel chooses: there may be other Rays here, and tests may run twice at once."""
    head = {"num_cpus": num_cpus, "include_dashboard": True, "dashboard_port": 0}
    return Cluster(initialize_head=True, head_node_args=head)
