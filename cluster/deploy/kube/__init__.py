"""What only Kubernetes has: the end of a pod, the topology of its nodes, worker groups' sizes, events."""
