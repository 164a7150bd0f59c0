"""The chart's values as a model.

`config` is core.config.cluster_config.ClusterConfig itself, so that the chart and the server cannot disagree
about a key. What goes on to Kubernetes as it is (tolerations, affinity, ...) is left for Kubernetes to check."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

sys.path.insert(0, str(Path(__file__).parents[1]))
from core.config.cluster_config import ClusterConfig
from core.config.live_config import LiveConfig
from core.config.model_rows import ModelName as RowName

Quantity = str | int
Raw = dict[str, Any]
NamesAndTexts = dict[str, str]
ModelName = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,20}[a-z0-9])?$")]
"""Part of the names of Kubernetes objects."""


class _Values(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Image(_Values):
    repository: str = "baton"
    tag: str = ""
    """Empty: the chart's appVersion. Give the CPU image its own tag."""
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pullSecrets: list[str] = []


class Placement(_Values):
    """Which nodes pods may run on, and which other pods make room for them."""

    nodeSelector: NamesAndTexts = {}
    tolerations: list[Raw] = []
    affinity: Raw = {}
    topologySpread: list[Raw] = []
    """topologySpreadConstraints; those without a labelSelector get the one of these pods. Empty: by host, as far as possible."""
    priorityClassName: str = ""
    runtimeClassName: str = ""
    schedulerName: str = ""


class Pod(Placement):
    """What every kind of pod has."""

    resources: Raw = {}
    """Kubernetes requests and limits, without GPUs and RDMA devices: those are added. `baton pods` prints them."""
    scratchSize: Quantity = "20Gi"
    """Disk for logs, caches and temporary files: the size of /tmp and the home folder, requested as ephemeral storage."""
    labels: NamesAndTexts = {}
    annotations: NamesAndTexts = {}
    env: list[Raw] = []
    envFrom: list[Raw] = []
    volumes: list[Raw] = []
    volumeMounts: list[Raw] = []
    initContainers: list[Raw] = []
    podSecurityContext: Raw = {}
    """Merged over `runAsNonRoot`, user and group 1000 and the runtime's seccomp profile."""
    securityContext: Raw = {}
    """Merged over `drop: [ALL]`, no privilege escalation and a root file system that is read-only."""


class Head(Pod):
    """Ray's head: it runs no part of Baton but Serve's controller."""

    resources: Raw = {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "4Gi"}}
    rayStartParams: NamesAndTexts = {}


class Group(Pod):
    """A worker group of KubeRay."""

    replicas: Annotated[int, Field(ge=0)] | None = None
    """Null: as many as the configured instances need."""
    minReplicas: Annotated[int, Field(ge=0)] | None = None
    """Null: `replicas`. With autoscaling the group's floor."""
    maxReplicas: Annotated[int, Field(ge=1)] | None = None
    """Null: `replicas`. With autoscaling the group's ceiling."""
    rayStartParams: NamesAndTexts = {}
    podDisruptionBudget: bool = True
    """As long as the group is as small as it gets, at most one of its pods is evicted at a time."""


class Pool(Group):
    """The pods of the prefill or of the decode instances."""

    gpusPerPod: int = Field(default=0, ge=0)
    """GPUs that a node has for a pod: it holds as many instances as fit, each with a GPU for each of its ranks.
    0: instances compute on CPUs."""
    instancesPerPod: int = Field(default=1, ge=1)
    """For instances on CPUs."""
    gpuResource: str = "nvidia.com/gpu"
    gpuDeviceClass: str = ""
    """GPUs are claimed as devices of this class, e.g. `gpu.nvidia.com`, instead of as `gpuResource` (DRA, Kubernetes 1.34)."""
    imex: bool = False
    """The pods share an IMEX channel of a ComputeDomain, in which all pools of the model are: NVLink between nodes."""
    resourceClaims: list[Raw] = []
    """More claims of the pod, which its containers get."""
    rdma: dict[str, Quantity] = {}
    """Resources of the node's RDMA device plug-in, e.g. `rdma/hca_shared_devices_a: 1`. With any the pod gets IPC_LOCK."""
    shmSize: Quantity | None = None
    """/dev/shm; null: the KV pools of the pod's instances, Ray's object store and a GiB."""
    hostNetwork: bool = False


class Ingress(Group):
    """The pods that speak HTTP; the global schedulers run on them, too."""

    resources: Raw = {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "8Gi"}}


class Service(_Values):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    port: int = Field(default=80, ge=1, le=65535)
    annotations: NamesAndTexts = {}


class ExposeIngress(_Values):
    enabled: bool = False
    className: str = ""
    host: str = ""
    tlsSecret: str = ""
    annotations: NamesAndTexts = {}
    """Added to those for ingress-nginx, which are harmless to others."""


class ExposeRoute(_Values):
    """An HTTPRoute of the Gateway API."""

    enabled: bool = False
    parentRefs: list[Raw] = []
    hostnames: list[str] = []
    annotations: NamesAndTexts = {}


class Expose(_Values):
    ingress: ExposeIngress = ExposeIngress()
    route: ExposeRoute = ExposeRoute()


class Model(_Values):
    """One more model of the same release, with pods and an endpoint of its own. What is left out is as for the first model."""

    config: ClusterConfig = ClusterConfig()
    prefill: Pool = Pool()
    decode: Pool = Pool()
    ingress: Ingress = Ingress()
    service: Service = Service()
    expose: Expose = Expose()


class FleetPods(_Values):
    """Pods of one row of `config.models`, or of a residency group's rows. What is left out is as in `prefill` and `decode`."""

    prefill: Pool = Pool()
    decode: Pool = Pool()


class ApiKeys(_Values):
    enabled: bool = True
    existingSecret: str = ""
    """With the entries `api-keys` (one key a line, perhaps with its scopes) and `metrics-key` (one of them, for Prometheus, which
    needs the scope `metrics`). Empty: one is made."""


class ExistingSecret(_Values):
    existingSecret: str = ""


class Claim(_Values):
    """A PersistentVolumeClaim that all pods which need it share."""

    enabled: bool = False
    existingClaim: str = ""
    """Empty: one is made, and kept when the release goes."""
    size: Quantity
    storageClass: str = ""
    accessModes: list[str] = ["ReadWriteMany"]


class ModelFetch(Placement):
    """A Job downloads models into the volume. Pods wait for it, and ask no hub themselves."""

    enabled: bool = False
    timeoutSeconds: int = Field(default=7200, ge=60)
    """How long a pod waits for it."""
    resources: Raw = {
        "requests": {"cpu": "1", "memory": "2Gi", "ephemeral-storage": "1Gi"},
        "limits": {"memory": "4Gi", "ephemeral-storage": "2Gi"},
    }


class ModelCache(Claim):
    """Without it each pod downloads for itself, into its own disk."""

    size: Quantity = "500Gi"
    fetch: ModelFetch = ModelFetch()


class Files(Claim):
    """A volume for the store where that is SQLite (`config.serve.store`): for one ingress."""

    size: Quantity = "100Gi"


class Upgrade(_Values):
    """A change of the pods starts a second cluster; it takes over when it is ready, then the first one drains."""

    type: Literal["NewCluster", "None"] = "NewCluster"
    """`None`: only changes of `config` are rolled out; nothing starts a second cluster."""
    deletionDelaySeconds: int = Field(default=60, ge=0)


class Autoscaling(_Values):
    enabled: bool = False
    idleTimeoutSeconds: int = Field(default=300, ge=1)
    resources: Raw = {}


class Valkey(Placement):
    """One pod with a disk, which the chart brings. Ray needs neither a cluster nor replicas of it."""

    image: str = "valkey/valkey:8.1.8-alpine"
    size: Quantity = "2Gi"
    storageClass: str = ""
    resources: Raw = {
        "requests": {"cpu": "100m", "memory": "256Mi", "ephemeral-storage": "64Mi"},
        "limits": {"memory": "512Mi", "ephemeral-storage": "256Mi"},
    }


class GcsFaultTolerance(_Values):
    """The state of Ray's head is kept outside of it: it may restart without ending the cluster."""

    enabled: bool = False
    address: Annotated[str, Field(pattern=r"^((rediss?://)?[A-Za-z0-9.-]+:[0-9]{1,5})?$")] = ""
    """HOST:PORT of a Redis or Valkey of yours; empty: the chart's own."""
    username: str = ""
    existingSecret: str = ""
    """With the entry `redis-password`. Empty: one is made and kept for the chart's own; with `address`, no password is used."""
    valkey: Valkey = Valkey()


class CertIssuer(_Values):
    """An issuer of cert-manager: it makes and renews a certificate that all pods share."""

    name: str = ""
    kind: str = "Issuer"
    group: str = "cert-manager.io"


class ClusterTls(_Values):
    """Whose certificates pods show each other (`config.security.tls: files`). With neither, they belong to the cluster key."""

    existingSecret: str = ""
    """A Secret of type kubernetes.io/tls with `ca.crt`."""
    issuer: CertIssuer = CertIssuer()


class Keda(_Values):
    """ScaledObjects that size the groups of pools by `baton_pool_wanted_instances`. For `kind: LeaderWorkerSet`."""

    enabled: bool = False
    prometheus: str = ""
    """Its address, e.g. `http://prometheus-operated.monitoring:9090`."""
    authenticationRef: str = ""
    """The name of a TriggerAuthentication for it."""
    pollingSeconds: int = Field(default=15, ge=1)
    cooldownSeconds: int = Field(default=300, ge=0)


class Topology(_Values):
    enabled: bool = True
    """Instances read where their node stands from labels, and the scheduler prefers near ones."""
    labelsOf: Literal["nodes", "pods"] = "nodes"
    """Whose labels: nodes' need a ClusterRole. Pods have the zone's from Kubernetes 1.35 on, and what their `labels` say."""
    labels: dict[Literal["zone", "rack", "nvlink_domain", "nic_gbit_per_s"], str] = {}
    """The label of each fact, where it is not the usual one (docs/kubernetes.md)."""


class Controller(Placement):
    """A small pod beside the cluster: events on the RayService when instances join, drain or are fenced."""

    enabled: bool = True
    scale: bool = False
    """Worker groups follow what Serve wants to run, within minReplicas and maxReplicas. Not beside Ray's own autoscaler."""
    resources: Raw = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}}
    periodSeconds: int = Field(default=5, ge=1)


def _pods(name: str) -> Raw:
    """A NetworkPolicyPeer: pods of that name in any namespace."""
    return {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": name}}}


_PUBLIC: list[Raw] = [
    {
        "ipBlock": {
            "cidr": "0.0.0.0/0",
            "except": ["10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"],
        }
    },
    {"ipBlock": {"cidr": "::/0", "except": ["fc00::/7", "fe80::/10"]}},
]
"""NetworkPolicyPeers: every public address, and so neither the cluster nor a cloud's metadata."""


class Egress(_Values):
    """What pods of the release may reach outside of it. Each list is of NetworkPolicyPeers but for `others`."""

    enabled: bool = False
    dns: list[Raw] = [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
            "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
        }
    ]
    kubernetesApi: list[Raw] = []
    """For those that ask it, at ports 443 and 6443; empty: any address, since it is no pod."""
    hub: list[Raw] = _PUBLIC
    """For those that download models, at port 443. With `modelCache.fetch` that is its Job alone."""
    images: list[Raw] = _PUBLIC
    """For ingresses, at the ports of the hosts in `config.pictures.url_hosts`; where that is empty, nothing."""
    store: list[Raw] = []
    """For ingresses, at port 5432, with `store.existingSecret`; empty: any address. Another port is a rule of `others`."""
    others: list[Raw] = []
    """NetworkPolicyEgressRules for every pod, e.g. to a collector of traces."""


class NetworkPolicy(_Values):
    enabled: bool = True
    clients: list[Raw] = []
    """NetworkPolicyPeers that may reach the API; empty: everybody, who then needs an API key."""
    operator: list[Raw] = [_pods("kuberay-operator")]
    """Who may reach the head's dashboard port: KubeRay deploys the application through it."""
    prometheus: list[Raw] = [_pods("prometheus")]
    """Who may read metrics."""
    egress: Egress = Egress()


class Monitoring(_Values):
    podMonitor: bool = False
    """For the Prometheus operator: Baton's metrics, and Ray's."""
    rules: bool = False
    dashboards: bool = False
    """A ConfigMap for Grafana's sidecar."""
    interval: str = "15s"
    labels: NamesAndTexts = {}
    """What your Prometheus selects monitors and rules by, e.g. `release: kube-prometheus-stack`."""


class Preflight(_Values):
    """`baton doctor` before anything serves."""

    job: bool = False
    """A hook before install and upgrade: pods like those of `pool`, on nodes of their own, each checked alone and against all
    others. When one is not fit, nothing is installed or changed."""
    pool: Literal["prefill", "decode"] = "decode"
    pods: int = Field(default=2, ge=2)
    expectGBPerS: float = Field(default=0, ge=0)
    """What a link should carry; 0: as much as the others do."""
    deadlineSeconds: int = Field(default=900, ge=60)
    initContainers: bool = True
    """Each prefill and decode pod checks its own node before it joins; it does not become ready where something is not fit."""


class ChartValues(Model):
    """Values of the Baton chart. The first model is described at the top level."""

    kind: Literal["RayService", "RayCluster", "LeaderWorkerSet"] = "RayService"
    """RayService: KubeRay watches and upgrades the application. RayCluster: a cluster, and a Job that deploys to it.
    LeaderWorkerSet: the same without KubeRay; the pods of an instance that spans several are a group."""
    nameOverride: str = ""
    fullnameOverride: str = ""
    image: Image = Image()
    models: dict[ModelName, Model] = {}
    modelPods: dict[RowName, FleetPods] = {}
    """Pods of rows of `config.models` that differ from `prefill` and `decode`; of a residency group under the group's name."""
    live: LiveConfig = LiveConfig()
    """What changes while the ingresses run, without a roll-out: service classes and tenants, of all models."""
    head: Head = Head()
    apiKeys: ApiKeys = ApiKeys()
    clusterKey: ExistingSecret = ExistingSecret()
    """Authenticates Baton's processes to each other; the entry `cluster-key`. Empty: one is made and kept."""
    ingressTls: ExistingSecret = ExistingSecret()
    """A Secret of type kubernetes.io/tls with `ca.crt`, for the names of the Services: the ingresses speak HTTPS. Empty: HTTP."""
    clusterTls: ClusterTls = ClusterTls()
    huggingFace: ExistingSecret = ExistingSecret()
    """With the entry `token`, for gated models."""
    modelCache: ModelCache = ModelCache()
    store: ExistingSecret = ExistingSecret()
    """The store that all ingresses share; the entry `url`, PostgreSQL's with its password. Empty: each ingress keeps responses in
    its memory, and there are no files and batches unless `files` is enabled."""
    files: Files = Files()
    upgrade: Upgrade = Upgrade()
    autoscaling: Autoscaling = Autoscaling()
    keda: Keda = Keda()
    rayAuth: ExistingSecret = ExistingSecret()
    """Ray's own token, without which nobody talks to its control plane; the entry `auth_token`. Empty: one is made and kept."""
    topology: Topology = Topology()
    controller: Controller = Controller()
    gcsFaultTolerance: GcsFaultTolerance = GcsFaultTolerance()
    networkPolicy: NetworkPolicy = NetworkPolicy()
    monitoring: Monitoring = Monitoring()
    preflight: Preflight = Preflight()
    serviceAccountAnnotations: NamesAndTexts = {}
    global_: Raw = Field(default={}, alias="global")
